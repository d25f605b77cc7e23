"""The paper's experiments as settings to begin with; whatever a person says explicitly replaces part of one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dsde.bench import paper, paper_tables
from dsde.bench.results import Results
from dsde.bench.setting import BASE, Setting
from dsde.bench.summary import CellSummary
from dsde.bench.table import Table
from dsde.bench.workloads import KINDS

Tables = Callable[[Results, Sequence[CellSummary]], list[Table]]
STATICS = tuple(f"static:{length}" for length in paper.STATIC_LENGTHS)
POOR_DRAFT = "skip:14-19"
"""the target without some of its layers; of the embedded target's tokens it gets one in five right"""

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


def _sweep(name: str, sweeps: dict[str, tuple[object, ...]]) -> tuple[str, ...]:
    return (name, *(f"{name}:{option}={value}" for option, values in sweeps.items() for value in values))


PRESETS: dict[str, Preset] = {
    "latency": Preset(
        "DSDE against the best static length and AdaEDL, workload by workload",
        Setting(
            policies=(BASE, *STATICS, "adaedl", "dsde", "auto"),
            workloads=KINDS,
            temperatures=(0.0, 1.0),
            num_requests=4,
            rounds=2,
        ),
        paper_tables.latency,
        needs_static=True,
    ),
    "low-acceptance": Preset(
        "the same with a draft that is mostly wrong",
        Setting(
            policies=(BASE, *STATICS, "adaedl", "dsde", "auto"),
            workloads=("summarise",),
            num_requests=4,
            rounds=2,
            draft=POOR_DRAFT,
        ),
        paper_tables.low_acceptance,
        needs_static=True,
    ),
    "scaling": Preset(
        "throughput from batch 1 to 64, with and without the cap",
        Setting(
            policies=(BASE, "static:4", "dsde:cap=off", "dsde", "auto"),
            batch_sizes=(1, 2, 4, 8, 16, 32, 64),
            num_requests=8,
            max_tokens=64,
            rounds=2,
        ),
        paper_tables.scaling,
    ),
    "sensitivity": Preset(
        "every hyper-parameter of DSDE and AdaEDL, one at a time",
        Setting(
            policies=(BASE, *_sweep("dsde", DSDE_SWEEPS), *_sweep("adaedl", ADAEDL_SWEEPS)), num_requests=6, rounds=2
        ),
        paper_tables.sensitivity,
    ),
    "signals": Preset(
        "correlation of draft entropy, KLD and WVIR with acceptance",
        Setting(policies=(BASE, "static:4"), temperatures=(0.0, 1.0), rounds=1, num_requests=24, traced="all"),
        paper_tables.signals,
    ),
}


def preset_tables(results: Results, summaries: Sequence[CellSummary]) -> list[Table]:
    """The tables of the preset that a run was made with; none without one."""
    preset = PRESETS.get(results.setting.preset or "")
    return preset.tables(results, summaries) if preset and summaries else []
