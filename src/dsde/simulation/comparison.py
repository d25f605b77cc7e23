"""Policies side by side on the same requests, against no speculation and the best static length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dsde.policies import make_policy
from dsde.simulation.costs import Costs
from dsde.simulation.measured import MeasuredCosts
from dsde.simulation.requests import Requests
from dsde.simulation.simulator import Result, simulate

STATIC_LENGTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20)
"""among which the best static one is sought"""


@dataclass(frozen=True, slots=True)
class Row:
    policy: str
    result: Result
    vs_off: float
    """speed over that without speculation"""
    vs_static: float
    """speed over that of the best static length"""

    def to_dict(self) -> dict[str, Any]:
        return {"policy": self.policy, "vs_off": self.vs_off, "vs_static": self.vs_static} | self.result.to_dict()


@dataclass(frozen=True, slots=True)
class Comparison:
    batch_size: int | None
    """None: all requests at once"""
    best_static: str
    rows: list[Row]

    def to_dict(self) -> dict[str, Any]:
        rows = [row.to_dict() for row in self.rows]
        return {"batch_size": self.batch_size, "best_static": self.best_static, "policies": rows}


def compare(
    specs: Sequence[str],
    requests: Requests,
    costs: Costs | MeasuredCosts,
    batch_size: int | None = None,
    *,
    prompts: bool = False,
) -> Comparison:
    """Every policy from a fresh start; `specs` as `make_policy` takes them."""
    policies = {spec: make_policy(spec) for spec in specs}  # before the work: one of them may be misspelt
    statics = {f"static:{length}" for length in STATIC_LENGTHS} | {spec for spec in specs if _is_static(spec)}
    policies |= {spec: make_policy(spec) for spec in ("off", *statics)}
    results = {
        spec: simulate(policy, requests, costs, batch_size, prompts=prompts) for spec, policy in policies.items()
    }
    best = max(sorted(statics), key=lambda spec: results[spec].tokens_per_s)
    off, static = results["off"].tokens_per_s, results[best].tokens_per_s
    rows = [
        Row(spec, results[spec], results[spec].tokens_per_s / off, results[spec].tokens_per_s / static)
        for spec in specs
    ]
    return Comparison(batch_size, best, rows)


def _is_static(spec: str) -> bool:
    return spec.startswith("static:") and "|" not in spec
