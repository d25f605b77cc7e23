"""The files of a run: results.json, report.md, report.html and the plots beside them."""

from __future__ import annotations

from pathlib import Path

from dsde.bench import drawing, plots
from dsde.bench.page import to_html
from dsde.bench.report import make_report, to_markdown
from dsde.bench.results import FILE_NAME, Results
from dsde.core.errors import InvalidInput

PLOTS = "plots"


def make_folder(folder: Path) -> None:
    """Find out before the work whether it can be written to, not after it."""
    try:
        (folder / PLOTS).mkdir(parents=True, exist_ok=True)
        (folder / "report.md").open("a").close()
    except OSError as error:
        raise InvalidInput(f"the report cannot be written to {folder}: {error.strerror}") from None


def write_files(results: Results, folder: Path) -> list[str]:
    """Make everything from `results` anew; returns why something is missing, if it is."""
    report = make_report(results)
    missing: list[str] = []
    drawings: dict[str, str] = {}
    try:
        figures = plots.draw(results, report.summaries)
        drawings = {name: drawing.to_svg(figure) for name, figure in figures.items()}
    except drawing.NoPlots as error:
        missing.append(str(error))
    for name, svg in drawings.items():
        (folder / PLOTS / f"{name}.svg").write_text(svg, encoding="utf-8")
    rows = [row.to_dict() for summary in report.summaries for row in summary.rows]
    results.save(folder / FILE_NAME, summary=rows, tables=[table.to_dict() for table in report.tables])
    (folder / "report.md").write_text(to_markdown(report, list(drawings)), encoding="utf-8")
    (folder / "report.html").write_text(to_html(report, drawings, missing), encoding="utf-8")
    return missing
