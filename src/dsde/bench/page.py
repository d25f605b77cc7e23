"""A report as one HTML file that needs nothing else: for a screen, a phone or paper, in light or dark."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from pathlib import Path

from dsde.bench import drawing, plots
from dsde.bench.report import HOW_TO_READ, Report, answer, facts
from dsde.bench.summary import CellSummary
from dsde.bench.table import Table
from dsde.bench.tables import label, latency_table, overview, speed_table, work_table

STYLE = Path(__file__).with_name("report.css")
_STYLED = {drawing.INK: "var(--ink)", drawing.MUTED: "var(--muted)", drawing.GRID: "var(--grid)"}


def to_html(report: Report, drawings: dict[str, str], missing: Sequence[str]) -> str:
    results = report.results
    parts = [f"<h1>{escape(report.title)}</h1>", f'<p class="muted">{escape(report.pair)}</p>']
    if report.summaries:
        first, *others = report.summaries
        parts.append(f'<p class="answer">{_answer(first)}<br><span class="note">{escape(label(first.cell))}</span></p>')
        if others:
            rest = "".join(f"<li>{escape(label(one.cell))}: {_answer(one)}</li>" for one in others)
            parts.append(f'<ul class="answers">{rest}</ul>')
    kind = "good" if report.verdict.good else "bad"
    parts.append(f'<p class="{kind}">{escape(report.verdict.sentence)}</p>')
    if not results.finished:
        parts.append('<p class="bad">This run was interrupted: not everything was measured.</p>')
    parts += [f'<p class="note">{escape(sentence)}</p>' for sentence in [*results.notes, *missing]]
    parts.append(f'<code class="command">{escape(results.command)}</code>')
    parts += [_html_table(table) for table in report.tables]
    if report.summaries and not report.tables:
        parts.append(_html_table(speed_table(report.summaries[0])))
    if drawings:
        figures = [
            f"<figure>{_inline(name, svg)}<figcaption>{escape(plots.CAPTIONS[name])}</figcaption></figure>"
            for name, svg in drawings.items()
        ]
        parts += ["<h2>Pictures</h2>", '<div class="figures">', *figures, "</div>"]
    parts.append("<h2>Figures</h2>")
    if len(report.summaries) > 1:
        parts.append(_html_table(overview(report.summaries)))
    for number, summary in enumerate(report.summaries):
        tables = [latency_table(summary), work_table(summary)]
        if number > 0 or report.tables:
            tables.insert(0, speed_table(summary))
        content = "".join(map(_html_table, tables))
        state = " open" if number == 0 else ""
        parts.append(f"<details{state}><summary>{escape(label(summary.cell))}</summary>{content}</details>")
    terms = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts(results).items())
    parts += ["<h2>Where and how</h2>", f"<dl>{terms}</dl>", f'<p class="note">{HOW_TO_READ}</p>']
    return _PAGE.format(title=escape(report.title), style=STYLE.read_text(encoding="utf-8"), body="\n".join(parts))


def _answer(summary: CellSummary) -> str:
    fastest, words = answer(summary)
    return f"<strong>{escape(fastest.contender)}</strong> {escape(words)}"


def _html_table(table: Table) -> str:
    headings = "".join(f"<th>{escape(heading)}</th>" for heading in table.headings)
    rows = []
    for number, row in enumerate(table.rows):
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in row[1:])
        marked = ' class="marked"' if number in table.marked else ""
        rows.append(f"<tr{marked}><th>{escape(row[0])}</th>{cells}</tr>")
    note = f'<p class="note">{escape(table.note)}</p>' if table.note else ""
    body = f"<table><thead><tr>{headings}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    return f'<h3>{escape(table.title)}</h3><div class="scroll">{body}</div>{note}'


def _inline(name: str, svg: str) -> str:
    """A picture as part of a page: in the page's own colours, with ids that no other picture has."""
    start = svg.index("<svg")
    end = svg.index(">", start)
    # The page decides on the size; the viewBox keeps the proportions.
    opening = re.sub(r' (width|height)="[^"]*"', "", svg[start:end])
    svg = opening + svg[end:]
    for colour, styled in _STYLED.items():
        svg = svg.replace(colour, styled)
    svg = svg.replace('id="', f'id="{name}-')
    return re.sub(r'(url\(#|href="#)', rf"\g<1>{name}-", svg)


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
{style}</style>
</head>
<body>
{body}
</body>
</html>
"""
