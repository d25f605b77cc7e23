"""The tables of a run: who is how fast where, how long requests wait, and what it cost in passes and drafts."""

from __future__ import annotations

from collections.abc import Sequence

from dsde.bench.results import Cell
from dsde.bench.statistics import Estimate
from dsde.bench.summary import CellSummary, Row
from dsde.bench.table import Table

NOTHING = "-"


def label(cell: Cell) -> str:
    return f"{cell.name}, batch {cell.batch_size}, temperature {cell.temperature:g}"


def overview(summaries: Sequence[CellSummary]) -> Table:
    """Speed against `off`, cells down, contenders across."""
    names = list(dict.fromkeys(row.contender for summary in summaries for row in summary.rows))
    rows = []
    for summary in summaries:
        found = {row.contender: row for row in summary.rows}
        entries = [f"{found[name].vs_off.value:.2f}x" if name in found else NOTHING for name in names]
        rows.append([label(summary.cell), *entries])
    return Table("Speed against off", ["", *names], rows)


def speed_table(summary: CellSummary) -> Table:
    rows = []
    for row in summary.rows:
        vs_static = [NOTHING, ""] if row.vs_static is None else [f"{row.vs_static.value:.2f}x", _span(row.vs_static, 2)]
        rows.append(
            [
                _name(row),
                _speed(row.tokens_per_s.value),
                _speed_span(row.tokens_per_s),
                f"{row.vs_off.value:.2f}x",
                _span(row.vs_off, 2),
                *vs_static,
            ]
        )
    best = summary.best_static
    interval = "95 % interval"
    headings = ["", "tokens/s", interval, "vs off", interval, f"vs {best}" if best else "vs static", interval]
    first = summary.rows[0]
    note = f"{first.num_requests} requests, {first.num_rounds} rounds" + (f"; best static: {best}" if best else "")
    return Table(f"Speed: {label(summary.cell)}", headings, rows, note, [_fastest(summary.rows)])


def latency_table(summary: CellSummary) -> Table:
    headings = ["", "mean latency s", *(f"{what} p{p} ms" for what in ("TTFT", "TPOT") for p in (50, 90, 99))]
    rows = [
        [
            _name(row),
            f"{row.latency_s:.3g}",
            *(f"{1000 * seconds:.3g}" for seconds in (*row.first_token_s, *row.per_token_s)),
        ]
        for row in summary.rows
    ]
    note = "Latency: from arrival to the last token. TTFT: to the first. TPOT: for each after it, mean of a request."
    return Table(f"Latency: {label(summary.cell)}", headings, rows, note)


def work_table(summary: CellSummary) -> Table:
    headings = ["", "accepted", "emitted/step", "length", "drafted", "wasted", "target passes", "draft passes", "texts"]
    rows = [
        [
            _name(row),
            NOTHING if row.acceptance_rate is None else f"{row.acceptance_rate:.0%}",
            NOTHING if row.num_draft_tokens is None else f"{row.acceptance_length:.2f}",
            NOTHING if row.mean_length is None else f"{row.mean_length:.2f}",
            _count(row.num_draft_tokens),
            _count(row.num_wasted_tokens),
            _count(row.num_target_passes),
            _count(row.num_draft_passes),
            _texts(row),
        ]
        for row in summary.rows
    ]
    note = (
        "Accepted: of drafted tokens. Emitted: by a step that drafted, the bonus token included. Length: drafted a "
        "step and request. Counts are of one round. Texts: against those of off."
    )
    slow = [
        name for name, found in summary.cell.contenders.items() if any(r.counts.num_host_steps for r in found.rounds)
    ]
    if slow:
        note += f" By the slower way over the host, in part or always: {', '.join(slow)}."
    return Table(f"Work: {label(summary.cell)}", headings, rows, note)


def _texts(row: Row) -> str:
    if row.num_different is None:
        return NOTHING
    if not row.lossless:
        return "lossy"
    return f"{row.num_different} differ" if row.num_different else "same"


def _fastest(rows: Sequence[Row]) -> int:
    return max(range(len(rows)), key=lambda number: rows[number].tokens_per_s.value)


def _name(row: Row) -> str:
    return row.contender if row.lossless else f"{row.contender} (LOSSY)"


def _speed(value: float) -> str:
    return f"{value:.0f}" if value >= 1000 else f"{value:.1f}"


def _speed_span(estimate: Estimate) -> str:
    return f"{_speed(estimate.low)} to {_speed(estimate.high)}"


def _span(estimate: Estimate, digits: int) -> str:
    return f"{estimate.low:.{digits}f} to {estimate.high:.{digits}f}"


def _count(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.0f}"
