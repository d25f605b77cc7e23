"""Links between the documents lead somewhere."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]


def anchors_of(text: str) -> set[str]:
    """Of its headings, as GitHub makes them."""
    headings = re.findall(r"^#+ +(.+)$", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), flags=re.M)
    names = (re.sub(r"\[([^]]*)]\([^)]*\)", r"\1", heading) for heading in headings)
    return {re.sub(r"[^\w\- ]", "", name.strip().lower()).replace(" ", "-") for name in names}


def dead_links_of(document: Path) -> list[str]:
    dead = []
    for link in re.findall(r"]\(([^)\s]+)\)", document.read_text(encoding="utf-8")):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = document.parent / path if path else document
        is_there = target.exists() and (not anchor or anchor in anchors_of(target.read_text(encoding="utf-8")))
        dead += [] if is_there else [link]
    return dead


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    assert dead_links_of(document) == []


def test_a_dead_link_is_found(tmp_path: Path) -> None:
    document = tmp_path / "page.md"
    document.write_text(
        "# A `heading`, [linked](x.md)\n[here](#a-heading-linked) [there](#b) [file](c.md) [web](http://d)\n"
    )
    assert dead_links_of(document) == ["x.md", "#b", "c.md"]
