"""What scheduler and workers tell each other. Rides on vLLM's own messages, as one attribute of each."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

ATTRIBUTE = "dsde"


@dataclass(slots=True)
class CatchUp:
    """Tokens of one request that the draft has not read."""

    request_id: str
    first: int
    """position of the first of them"""
    tokens: list[int]


@dataclass(slots=True)
class Directive:
    """From the scheduler, with every step: what the drafting at its end shall be like."""

    step: int
    """number of the step, by which its report is known; 0: nobody asks for one"""
    lengths: dict[str, int] = field(default_factory=dict)
    """by request, for those that decode in the next step"""
    longest: int = 0
    """of them"""
    catch_up: list[CatchUp] = field(default_factory=list)

    @property
    def is_timed(self) -> bool:
        """Whether somebody wants to know what its parts took."""
        return self.step > 0

    @property
    def num_catch_up_tokens(self) -> int:
        return sum(len(piece.tokens) for piece in self.catch_up)


@dataclass(slots=True)
class Feedback:
    """From a worker, with the output of every step that is timed."""

    verify_s: float = 0.0
    draft_s: float = 0.0
    step_s: float = 0.0
    """from the end of the step before to that of this one: these, and what the device waited; 0: nobody knows"""
    request_ids: list[str] = field(default_factory=list)
    """in the order of `signals`"""
    num_drafted: list[int] = field(default_factory=list)
    """[requests] verified positions of each"""
    signals: NDArray[np.float64] | None = None
    """[sum(num_drafted), 5] KLD, entropy, top probability, margin and the token's own probability"""


def attached(message: Any) -> Any:
    """The directive or feedback on one of vLLM's messages; None: there is none."""
    return getattr(message, ATTRIBUTE, None)


def attach(message: Any, content: Directive | Feedback) -> None:
    setattr(message, ATTRIBUTE, content)
