"""Ranges of what a person may ask of a policy, and the one sentence said when it is outside. Knows no policy."""

from __future__ import annotations

import math
from collections.abc import Collection

from dsde.core.errors import InvalidInput
from dsde.core.params import LONGEST_DRAFT as LONGEST

__all__ = ["LARGEST_BUDGET", "LONGEST", "check_choice", "check_real", "check_whole"]

LARGEST_BUDGET = 1_000_000
"""most tokens a step that a whole batch may be given"""


def check_whole(field: str, value: object, low: int, high: int) -> None:
    """`value` is a whole number within low..high, or InvalidInput."""
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise InvalidInput(f"{field} must be a whole number from {low} to {high}, not {value!r}")


def check_real(field: str, value: object, low: float, high: float) -> None:
    """`value` is a finite number within low..high, or InvalidInput."""
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and low <= value <= high:
        return
    span = f"from {low:g} to {high:g}" if math.isfinite(high) else f"of at least {low:g}"
    raise InvalidInput(f"{field} must be a number {span}, not {value!r}")


def check_choice(field: str, value: object, allowed: Collection[str]) -> None:
    """`value` is one of the allowed words, or InvalidInput."""
    if not isinstance(value, str) or value not in allowed:
        raise InvalidInput(f"{field} must be one of {', '.join(allowed)}, not {value!r}")
