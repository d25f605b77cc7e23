"""What a run has to say, ready to be written in one form or another, and as Markdown. Made from results alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dsde.bench import plots
from dsde.bench.presets import preset_tables
from dsde.bench.results import Results
from dsde.bench.setting import BASE
from dsde.bench.summary import CellSummary, Row, summarise
from dsde.bench.table import Table
from dsde.bench.tables import label, latency_table, overview, speed_table, work_table
from dsde.bench.verdict import Verdict, judge

HOW_TO_READ = (
    "Contenders take turns in every round, in one process, so that whatever else the machine does hurts all alike. "
    "Intervals are 95 %, by the bootstrap over rounds and requests at once. Sampled texts come from seeds, so that all "
    "contenders write the same. Every prompt is new to the KV cache; policies keep what they have learnt."
)


@dataclass(frozen=True, slots=True)
class Report:
    results: Results
    summaries: list[CellSummary]
    tables: list[Table]
    """of the preset"""
    verdict: Verdict

    @property
    def title(self) -> str:
        preset = self.results.setting.preset
        return f"dsde bench: {preset}" if preset else "dsde bench"

    @property
    def pair(self) -> str:
        models = self.results.models
        return f"{models['target']} with draft {models['draft']}, {models['dtype']} on {models['device']}"


def make_report(results: Results) -> Report:
    summaries = summarise(results)
    return Report(results, summaries, preset_tables(results, summaries), judge(results))


def answer(summary: CellSummary) -> tuple[Row, str]:
    """The fastest contender of a cell, and what is to be said of it."""
    fastest = max(summary.rows, key=lambda row: row.tokens_per_s.value)
    if fastest.contender == BASE:
        return fastest, "is the fastest: nothing that was tried is worth its drafts here."
    ratio = fastest.vs_off
    certain = "" if ratio.low > 1 else ", which may be chance"
    return fastest, f"is the fastest: {ratio.value:.2f} times off ({ratio.low:.2f} to {ratio.high:.2f}){certain}."


def facts(results: Results) -> dict[str, str]:
    return results.machine | {
        "dsde": results.dsde,
        "measured": f"{results.started}, {results.elapsed_s / 60:.1f} minutes",
        "arrival": results.setting.arrival,
    }


def facts_line(results: Results) -> str:
    return "; ".join(f"{name} {value}" for name, value in facts(results).items()) + "."


def to_markdown(report: Report, pictures: Sequence[str]) -> str:
    results = report.results
    parts = [f"# {report.title}", f"{report.pair}.", f"    {results.command}", facts_line(results)]
    for summary in report.summaries:
        fastest, words = answer(summary)
        parts.append(f"- {label(summary.cell)}: **{fastest.contender}** {words}")
    parts += [report.verdict.sentence, *results.notes]
    if not results.finished:
        parts.append("**This run was interrupted: not everything was measured.**")
    parts += [table.to_markdown() for table in report.tables]
    parts += [f"![{plots.CAPTIONS[name]}](plots/{name}.svg)\n\n{plots.CAPTIONS[name]}" for name in pictures]
    if len(report.summaries) > 1:
        parts.append(overview(report.summaries).to_markdown())
    for summary in report.summaries:
        parts += [make(summary).to_markdown() for make in (speed_table, latency_table, work_table)]
    return "\n\n".join([*parts, HOW_TO_READ]) + "\n"
