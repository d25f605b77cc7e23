"""How far off a mean of a few measurements may be."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

STUDENT = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 8: 2.36}
"""two-sided 95 % by the number of measurements"""


def half_width(values: Sequence[float] | np.ndarray) -> float:
    """Of the 95 % interval of their mean; 0 of a single one, which tells nothing of it."""
    num = len(values)
    return float(STUDENT.get(num, 2.0) * np.std(values, ddof=1) / num**0.5) if num > 1 else 0.0
