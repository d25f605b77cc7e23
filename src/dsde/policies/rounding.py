"""From real-valued lengths to whole ones, in the two ways the presets ask for. Knows nothing of policies."""

from __future__ import annotations

from typing import Literal

import numpy as np

from dsde.policies.base import FloatArray

Rounding = Literal["nearest", "ceil"]


def round_values(values: FloatArray, rounding: Rounding) -> FloatArray:
    """Whole numbers, still as floats. Halves go up: NumPy's half-to-even would treat 2.5 and 3.5 differently."""
    return np.ceil(values) if rounding == "ceil" else np.floor(values + 0.5)
