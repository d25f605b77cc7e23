"""What a preset has measured, beside the figures of the paper. Made from results alone."""

from __future__ import annotations

from collections.abc import Sequence

from dsde.bench import paper
from dsde.bench.results import Results
from dsde.bench.setting import BASE
from dsde.bench.signals import SIGNALS, correlations
from dsde.bench.summary import CellSummary, Row, is_static
from dsde.bench.table import Table

NOTHING = "-"


def latency(results: Results, summaries: Sequence[CellSummary]) -> list[Table]:
    """Mean latency by workload; the best static length is the one that is best there, as the paper has it."""
    tables = []
    for temperature in dict.fromkeys(summary.cell.temperature for summary in summaries):
        cells = [summary for summary in summaries if summary.cell.temperature == temperature]
        others = [row.contender for row in cells[0].rows if row.contender != BASE and not is_static(row.contender)]
        rows, totals, profiling_s = [], [0.0] * (2 + len(others)), 0.0
        for summary in cells:
            best = _quickest_static(summary)
            found = [_row(summary, BASE), best, *(_row(summary, name) for name in others)]
            searched_s = _static_seconds(results, summary)
            totals = [total + row.latency_s for total, row in zip(totals, found, strict=True)]
            profiling_s += searched_s
            entries = [_seconds(row.latency_s) for row in found]
            entries[1] += f" ({best.contender})"
            rows.append([summary.cell.name, *entries, f"{searched_s:.0f} s"])
        means = [total / len(cells) for total in totals]
        rows.append(["mean", *map(_seconds, means), f"{profiling_s:.0f} s"])
        rows.append(["of best static", *(f"{mean / means[1]:.0%}" for mean in means), ""])
        rows += _paper_latency(temperature, others)
        headings = ["mean latency", BASE, "best static", *others, "search for static"]
        note = (
            f"Paper: {paper.SOURCE}, {paper.PAIR}, means over eight data sets. Search: one round of all static "
            "lengths, which is what it takes to know the best; the others need none."
        )
        tables.append(Table(f"Latency, temperature {temperature:g}", headings, rows, note, [len(cells)]))
    return tables


def _paper_latency(temperature: float, others: Sequence[str]) -> list[list[str]]:
    known = paper.LATENCY_S.get(temperature)
    if known is None:
        return []
    values = [known.get(name) for name in (BASE, "best static", *others)]
    best = known["best static"] or 1.0
    return [
        ["paper", *(NOTHING if value is None else _seconds(value) for value in values), f"{paper.PROFILING_HOURS} h"],
        ["paper, of best static", *(NOTHING if value is None else f"{value / best:.0%}" for value in values), ""],
    ]


def low_acceptance(results: Results, summaries: Sequence[CellSummary]) -> list[Table]:
    rows = []
    for summary in summaries:
        best = _quickest_static(summary)
        for row in summary.rows:
            known = "best static" if row is best else row.contender
            theirs = paper.LOW_ACCEPTANCE.get(known)
            rows.append(
                [
                    f"{row.contender}, T {row.temperature:g}",
                    _seconds(row.latency_s),
                    f"{row.latency_s / best.latency_s:.0%}",
                    NOTHING if row.acceptance_rate is None else f"{row.acceptance_rate:.0%}",
                    NOTHING if row.mean_length is None else f"{row.mean_length:.2f}",
                    NOTHING if theirs is None or row.temperature > 0 else f"{theirs:.0%}",
                ]
            )
    headings = ["a poor draft", "mean latency", "of best static", "accepted", "length", "paper, of best static"]
    note = f"Draft: {results.models['draft']}. Paper: {paper.SOURCE}, {paper.LOW_ACCEPTANCE_PAIR}."
    return [Table("Low acceptance", headings, rows, note)]


def scaling(results: Results, summaries: Sequence[CellSummary]) -> list[Table]:
    tables = []
    for temperature in dict.fromkeys(summary.cell.temperature for summary in summaries):
        cells = [summary for summary in summaries if summary.cell.temperature == temperature]
        first, last = cells[0], cells[-1]
        rows = []
        for row in first.rows:
            speeds = [_row(summary, row.contender).tokens_per_s.value for summary in cells]
            theirs = paper.SCALING.get(temperature, {}).get(row.contender)
            rows.append(
                [
                    row.contender,
                    *(f"{speed:.1f}" for speed in speeds),
                    f"{speeds[-1] / speeds[0]:.2f}x",
                    NOTHING if theirs is None else f"{theirs:.2f}x",
                ]
            )
        sizes = [f"batch {summary.cell.batch_size}" for summary in cells]
        growth = f"{last.cell.batch_size} over {first.cell.batch_size}"
        headings = ["tokens/s", *sizes, growth, "paper, 64 over 1"]
        note = (
            f"Paper: {paper.SOURCE}, CNN/DM, {paper.PAIR}. A batch of n has n requests, but never fewer than "
            f"{results.setting.num_requests}."
        )
        tables.append(Table(f"Scaling, temperature {temperature:g}", headings, rows, note))
    return tables


def sensitivity(results: Results, summaries: Sequence[CellSummary]) -> list[Table]:
    tables = []
    for name in ("dsde", "adaedl"):
        for summary in summaries:
            own = summary.row(name)
            if own is None:
                continue
            rows = [
                [
                    row.contender,
                    f"{row.tokens_per_s.value:.1f}",
                    f"{row.vs_off.value:.2f}x",
                    f"{row.tokens_per_s.value / own.tokens_per_s.value - 1:+.1%}",
                    NOTHING if row.acceptance_rate is None else f"{row.acceptance_rate:.0%}",
                    NOTHING if row.mean_length is None else f"{row.mean_length:.2f}",
                ]
                for row in summary.rows
                if row.contender.partition(":")[0] == name
            ]
            headings = ["", "tokens/s", "vs off", f"vs {name}", "accepted", "length"]
            title = f"Sensitivity of {name}: {summary.cell.name}, temperature {summary.cell.temperature:g}"
            tables.append(Table(title, headings, rows, "One option at a time; we know of no figures of the paper."))
    return tables


def signals(results: Results, summaries: Sequence[CellSummary]) -> list[Table]:
    temperatures = list(dict.fromkeys(trace.temperature for trace in results.traces))
    found = {t: correlations([trace for trace in results.traces if trace.temperature == t]) for t in temperatures}
    rows = []
    for name in SIGNALS:
        values = [found[t][name].value for t in temperatures]
        theirs = paper.CORRELATION.get(name)
        ours = [NOTHING if value is None else f"{value:+.3f}" for value in values]
        rows.append([name, *ours, NOTHING if theirs is None else f"{theirs:+.3f}"])
    steps = ", ".join(f"{found[t][SIGNALS[0]].num_steps} steps at T {t:g}" for t in temperatures)
    headings = ["correlation with acceptance", *(f"T {t:g}" for t in temperatures), "paper, T 0"]
    note = (
        f"{steps}. Paper: {paper.SOURCE}; at T 1 it finds all near 0. Mean KLD and WVIR are of what was verified "
        "before the step, the entropy is of the step's own draft. The last row could not be known in time."
    )
    return [Table("Signals", headings, rows, note)]


def _static_seconds(results: Results, summary: CellSummary) -> float:
    findings = [found for name, found in summary.cell.contenders.items() if is_static(name)]
    return sum(sum(one.seconds for one in found.rounds) / len(found.rounds) for found in findings)


def _quickest_static(summary: CellSummary) -> Row:
    return min((row for row in summary.rows if is_static(row.contender)), key=lambda row: row.latency_s)


def _row(summary: CellSummary, contender: str) -> Row:
    row = summary.row(contender)
    assert row is not None
    return row


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{1000 * value:.0f} ms"
