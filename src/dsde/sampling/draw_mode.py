"""How a sequence's tokens are chosen and drafted ones judged, in numbers that a device understands."""

from __future__ import annotations

from enum import IntEnum


class DrawMode(IntEnum):
    PADDING = -1
    GREEDY = 0
    RATIO = 1
    """drawn with noise of its own for every purpose; judged by the ratio of probabilities"""
    MATCH = 2
    """drawn with noise that draft and target share; judged by equality with the target's own token"""
