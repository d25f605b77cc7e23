"""The paper's experiments: what each measures, and the table that puts it beside the paper's figures.

A preset is a setting to begin with; whatever a person says explicitly replaces it. Tables are made from results alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dsde.bench import paper
from dsde.bench.results import Results
from dsde.bench.setting import BASE, Setting
from dsde.bench.signals import SIGNALS, correlations
from dsde.bench.summary import CellSummary, Row, is_static
from dsde.bench.table import Table
from dsde.bench.workloads import KINDS
from dsde.policies import POLICIES

Tables = Callable[[Results, Sequence[CellSummary]], list[Table]]
NOTHING = "-"
STATICS = tuple(f"static:{length}" for length in paper.STATIC_LENGTHS)
POOR_DRAFT = "skip:4-25"
"""of the target's own layers: quick, and nearly always wrong"""

DSDE_SWEEPS: dict[str, tuple[object, ...]] = {
    "min": (1, 4),
    "max": (8, 40),
    "initial": (2, 8),
    "warmup": (10, 100),
    "decay": (0.7, 0.95),
    "short": (5, 20),
    "long": (20, 60),
    "cap": ("off",),
    "preset": ("release",),
}
"""values beside the paper's own"""
ADAEDL_SWEEPS: dict[str, tuple[object, ...]] = {
    "gamma": (0.1, 0.4),
    "max": (4, 12),
    "threshold": (0.3, 0.7),
    "alpha": (0.8, 0.95),
    "epsilon": (0.005, 0.05),
    "beta1": (0.2, 0.8),
    "beta2": (0.5, 0.99),
}


@dataclass(frozen=True, slots=True)
class Preset:
    description: str
    setting: Setting
    tables: Tables
    needs_static: bool = False
    """whether its table is about static lengths, so that there must be one"""


def newest() -> tuple[str, ...]:
    """Policies of ours that the paper does not know."""
    return ("auto",) if "auto" in POLICIES else ()


def _sweep(name: str, sweeps: dict[str, tuple[object, ...]]) -> tuple[str, ...]:
    return (name, *(f"{name}:{option}={value}" for option, values in sweeps.items() for value in values))


def _latency(results: Results, summaries: Sequence[CellSummary]) -> list[Table]:
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
            rows.append([summary.cell.workload, *entries, f"{searched_s:.0f} s"])
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


def _low_acceptance(results: Results, summaries: Sequence[CellSummary]) -> list[Table]:
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


def _scaling(results: Results, summaries: Sequence[CellSummary]) -> list[Table]:
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


def _sensitivity(results: Results, summaries: Sequence[CellSummary]) -> list[Table]:
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
            title = f"Sensitivity of {name}: {summary.cell.workload}, temperature {summary.cell.temperature:g}"
            tables.append(Table(title, headings, rows, "One option at a time; we know of no figures of the paper."))
    return tables


def _signals(results: Results, summaries: Sequence[CellSummary]) -> list[Table]:
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
    return f"{value:.2f} s"


PRESETS: dict[str, Preset] = {
    "latency": Preset(
        "DSDE against the best static length and AdaEDL, workload by workload",
        Setting(
            policies=(BASE, *STATICS, "adaedl", "dsde", *newest()),
            workloads=KINDS,
            temperatures=(0.0, 1.0),
            num_requests=4,
            rounds=2,
        ),
        _latency,
        needs_static=True,
    ),
    "low-acceptance": Preset(
        "the same with a draft that is nearly always wrong",
        Setting(
            policies=(BASE, *STATICS, "adaedl", "dsde", *newest()),
            workloads=("summarise",),
            num_requests=4,
            rounds=2,
            draft=POOR_DRAFT,
        ),
        _low_acceptance,
        needs_static=True,
    ),
    "scaling": Preset(
        "throughput from batch 1 to 64, with and without the cap",
        Setting(
            policies=(BASE, "static:4", "dsde:cap=off", "dsde", *newest()),
            batch_sizes=(1, 2, 4, 8, 16, 32, 64),
            num_requests=8,
            max_tokens=64,
            rounds=2,
        ),
        _scaling,
    ),
    "sensitivity": Preset(
        "every hyper-parameter of DSDE and AdaEDL, one at a time",
        Setting(
            policies=(BASE, *_sweep("dsde", DSDE_SWEEPS), *_sweep("adaedl", ADAEDL_SWEEPS)), num_requests=6, rounds=2
        ),
        _sensitivity,
    ),
    "signals": Preset(
        "correlation of draft entropy, KLD and WVIR with acceptance",
        Setting(policies=(BASE, "static:4"), temperatures=(0.0, 1.0), rounds=1, num_requests=24, traced="all"),
        _signals,
    ),
}


def preset_tables(results: Results, summaries: Sequence[CellSummary]) -> list[Table]:
    """The tables of the preset that a run was made with; none without one."""
    preset = PRESETS.get(results.setting.preset or "")
    return preset.tables(results, summaries) if preset and summaries else []
