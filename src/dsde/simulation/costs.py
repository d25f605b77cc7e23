"""What a step costs, in virtual seconds. Knows counts of sequences and tokens only.

Both models read their weights whatever the batch (flat) until arithmetic becomes the limit (linear). A draft that was
paused reads what it missed in its first pass. Not modelled: attention over long contexts, graphs that pad a batch, and
noise.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar

import numpy as np

from dsde.core.errors import InvalidInput
from dsde.policies.base import FloatArray, IntArray
from dsde.policies.limits import check_real, check_whole
from dsde.simulation.measured import MeasuredCosts, sizes_of_passes

LARGEST_BATCH = 65536
"""that a table may say something of"""


@dataclass(frozen=True, slots=True)
class Line:
    """Seconds of one pass: `flat_s` for up to `num_flat` tokens, and `each_s` for every further one."""

    flat_s: float
    num_flat: float = 0.0
    each_s: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            check_real(field.name, getattr(self, field.name), 0.0, math.inf)

    def seconds(self, num_tokens: int) -> float:
        return self.flat_s + self.each_s * max(num_tokens - self.num_flat, 0)

    def seconds_of(self, num_tokens: IntArray) -> FloatArray:
        seconds: FloatArray = self.flat_s + self.each_s * np.maximum(num_tokens - self.num_flat, 0)
        return seconds


@dataclass(frozen=True, slots=True)
class Costs:
    draft: Line
    """one pass of the draft, by sequences that draft in it"""
    verify: Line
    """the target's pass and the verdict, by packed tokens: one a sequence, the drafted ones and those of prompts"""
    step_s: float = 0.0
    """everything else, once a step"""
    end_s: ClassVar[float] = 0.0
    """as in MeasuredCosts; here ends cost nothing"""
    whole: ClassVar[int] = 0
    """likewise; here every pass is of those who still draft"""

    def __post_init__(self) -> None:
        check_real("step_s", self.step_s, 0.0, math.inf)
        if not self.verify.flat_s + self.verify.each_s + self.step_s > 0:
            raise InvalidInput("verify must cost something, give flat_s above 0")

    def draft_s(self, passes: IntArray, num_missed: int = 0, is_ruled: bool = False) -> float:
        """Ragged drafting: pass j holds the sequences that take part in more than j passes, the first what they missed,
        too. A rule that ends drafts costs nothing."""
        if not passes.any():
            return 0.0
        return float(self.draft.seconds_of(sizes_of_passes(passes, num_missed)).sum())

    def pass_s(self, num_sequences: IntArray | int) -> FloatArray:
        """Of one pass of the draft."""
        return self.draft.seconds_of(np.asarray(num_sequences))

    def verify_s(self, num_sequences: int, num_tokens: IntArray | int) -> FloatArray:
        """Of packed tokens, whoever they belong to."""
        return self.verify.seconds_of(np.asarray(num_tokens))

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


COSTS = {
    # Fitted to what docs/benchmarks.md says of an 8B-shaped target with a 1B-shaped draft on one H200.
    "memory-bound": Costs(Line(0.8e-3, 8, 8e-6), Line(3.9e-3, 8, 22e-6)),
    # A machine whose arithmetic is the limit from the fifth token on, as on a CPU: time follows the tokens.
    "compute-bound": Costs(Line(2e-3, 4, 0.5e-3), Line(20e-3, 4, 5e-3)),
}


def make_costs(text: str) -> Costs | MeasuredCosts:
    """A preset by name, or JSON: `{"draft": {"flat_s": 0.001}, "verify": {"flat_s": 0.005, "each_s": 2e-5}}`.

    Lists in place of the inner objects are a measured table, see `MeasuredCosts`.
    """
    if text.strip() in COSTS:
        return COSTS[text.strip()]
    if not text.strip().startswith("{"):
        raise InvalidInput(f"cost must be one of {', '.join(COSTS)} or a JSON object, not {text[:40]!r}")
    try:
        given = json.loads(text)
    except json.JSONDecodeError as error:
        raise InvalidInput(f"cost is not valid JSON: {error}") from None
    if isinstance(given.get("verify"), list):
        names = ("step_s", "drafting_s", "ruled_s", "end_s")
        known = {"machine", "draft", "verify", "catch_up", "whole", *names}
        _check_keys("cost", given, known, {"draft", "verify"})
        overheads = {name: given.get(name, 0.0) for name in names}
        for name, seconds in overheads.items():
            check_real(name, seconds, 0.0, math.inf)
        whole = given.get("whole", 0)
        check_whole("whole", whole, 0, LARGEST_BATCH)
        return MeasuredCosts(given["draft"], given["verify"], given.get("catch_up"), **overheads, whole=whole)
    _check_keys("cost", given, {"draft", "verify", "step_s"}, {"draft", "verify"})
    lines = {name: _make_line(name, given[name]) for name in ("draft", "verify")}
    return Costs(**lines, step_s=given.get("step_s", 0.0))


def _make_line(name: str, given: object) -> Line:
    if not isinstance(given, dict):
        raise InvalidInput(f'{name} must be an object like {{"flat_s": 0.005}}, not {given!r}')
    _check_keys(name, given, {"flat_s", "num_flat", "each_s"}, {"flat_s"})
    try:
        return Line(**given)
    except InvalidInput as error:
        raise InvalidInput(f"{name}: {error}") from None


def _check_keys(name: str, given: dict[str, Any], known: set[str], needed: set[str]) -> None:
    for key in given:
        if key not in known:
            raise InvalidInput(f"{name} has no key {key!r}; allowed are {', '.join(sorted(known))}")
    if missing := sorted(needed - set(given)):
        raise InvalidInput(f"{name} lacks {', '.join(missing)}")
