"""From rounds to what a table says: speeds with intervals, ratios, latencies, acceptance, waste. Makes no text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from typing import Any

import numpy as np

from dsde.bench.results import Cell, Counts, Findings, Results
from dsde.bench.setting import BASE
from dsde.bench.statistics import Bootstrap, Estimate, Times, percentiles


@dataclass(frozen=True, slots=True)
class Row:
    """One contender in one cell, or on the requests of one kind in it."""

    workload: str
    batch_size: int
    temperature: float
    contender: str
    num_requests: int
    num_rounds: int
    tokens_per_s: Estimate
    vs_off: Estimate
    vs_static: Estimate | None
    """against the best static length of the cell; None where there is none"""
    latency_s: float
    """mean, from arrival to the last token"""
    first_token_s: tuple[float, float, float]
    """50th, 90th and 99th percentile, like the next"""
    per_token_s: tuple[float, float, float]
    """after the first"""
    num_tokens: int
    """a round, like all counts"""
    num_target_passes: float
    num_draft_passes: float | None
    num_draft_tokens: float | None
    num_wasted_tokens: float | None
    """drafted in vain"""
    acceptance_rate: float | None
    acceptance_length: float
    mean_length: float | None
    """drafted tokens a step and request, steps without a draft included"""
    drafts_by_length: tuple[int, ...]
    """how many drafts had 0, 1, 2, ... tokens, in all rounds"""
    num_different: int | None
    """texts that are not those of `off`; None where they were not compared"""
    lossless: bool

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class CellSummary:
    cell: Cell
    best_static: str | None
    rows: list[Row]

    def row(self, contender: str) -> Row | None:
        return next((row for row in self.rows if row.contender == contender), None)


@dataclass(frozen=True, slots=True)
class KindSpeed:
    """How much faster than `off` one contender is on the requests of one kind."""

    label: str
    contender: str
    vs_off: Estimate


def summarise(results: Results) -> list[CellSummary]:
    return [summarise_cell(cell) for cell in results.measured]


def is_static(name: str) -> bool:
    return name.startswith("static:") and "|" not in name


def times_of(findings: Findings, num_rounds: int) -> Times:
    rounds = findings.rounds[:num_rounds]
    tokens = np.array([one.num_tokens for one in rounds], np.float64)
    return Times(tokens, np.array([one.shares_s for one in rounds], np.float64))


def summarise_cell(cell: Cell) -> CellSummary:
    num_rounds, num_requests = cell.num_rounds, len(cell.kinds)
    times = {name: times_of(findings, num_rounds) for name, findings in cell.contenders.items()}
    bootstrap = Bootstrap(num_rounds, num_requests)
    statics = [name for name in times if is_static(name)]
    best = max(statics, key=lambda name: times[name].speed, default=None)
    rows = []
    for name, findings in cell.contenders.items():
        counts = [one.counts for one in findings.rounds[:num_rounds]]
        rows.append(
            Row(
                workload=cell.workload,
                batch_size=cell.batch_size,
                temperature=cell.temperature,
                contender=name,
                num_requests=num_requests,
                num_rounds=num_rounds,
                tokens_per_s=bootstrap.speed(times[name]),
                vs_off=bootstrap.ratio(times[name], times[BASE]),
                vs_static=None if best is None else bootstrap.ratio(times[name], times[best]),
                num_different=len(findings.differences) if findings.compared else None,
                lossless=findings.lossless,
                **_latencies(findings, num_rounds),
                **_counts(counts),
            )
        )
    return CellSummary(cell, best, rows)


def _latencies(findings: Findings, num_rounds: int) -> dict[str, Any]:
    rounds = findings.rounds[:num_rounds]
    totals = [seconds for one in rounds for seconds in one.total_s]
    firsts = [seconds for one in rounds for seconds in one.first_token_s]
    tokens = [count for one in rounds for count in one.num_tokens]
    each = [(t - f) / (n - 1) for t, f, n in zip(totals, firsts, tokens, strict=True) if n > 1]
    return {
        "latency_s": sum(totals) / len(totals),
        "first_token_s": percentiles(firsts),
        "per_token_s": percentiles(each),
        "num_tokens": round(sum(tokens) / num_rounds),
    }


def _counts(counts: Sequence[Counts]) -> dict[str, Any]:
    """Means over rounds."""
    drafted = _mean([one.num_draft_tokens for one in counts])
    accepted = _mean([one.num_accepted_tokens for one in counts]) or 0.0
    drafts, decodes = sum(one.num_drafts for one in counts), sum(one.num_decodes for one in counts)
    by_length = [sum(several) for several in zip_longest(*(one.drafts_by_length for one in counts), fillvalue=0)]
    return {
        "num_target_passes": _mean([one.num_target_passes for one in counts]),
        "num_draft_passes": _mean([one.num_draft_passes for one in counts]),
        "num_draft_tokens": drafted,
        "num_wasted_tokens": None if drafted is None else drafted - accepted,
        "acceptance_rate": accepted / drafted if drafted else None,
        "acceptance_length": 1 + accepted * len(counts) / drafts if drafts else 1.0,
        "mean_length": None if drafted is None else drafted * len(counts) / max(decodes, 1),
        "drafts_by_length": (max(decodes - sum(by_length), 0), *by_length),
    }


def _mean(values: Sequence[int | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if len(known) == len(values) and known else None


def speeds_by_kind(cells: Sequence[Cell]) -> list[KindSpeed]:
    """Every kind of every workload by itself: where the batch and the temperature are the same, texts still differ."""
    speeds = []
    for cell in cells:
        times = {name: times_of(findings, cell.num_rounds) for name, findings in cell.contenders.items()}
        for kind in dict.fromkeys(cell.kinds):
            chosen = [place for place, one in enumerate(cell.kinds) if one == kind]
            bootstrap = Bootstrap(cell.num_rounds, len(chosen))
            base = times[BASE].only(chosen)
            speeds += [KindSpeed(kind, name, bootstrap.ratio(one.only(chosen), base)) for name, one in times.items()]
    return speeds
