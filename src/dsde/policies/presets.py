"""The constants of DSDE (arXiv 2509.01083): what the paper says and what the authors' released code does instead.

Knows numbers only; what they do is in `dsde.py`. `dataclasses.replace(PAPER, decay=0.9)` makes a variant of one's own.
"""

from __future__ import annotations

from dataclasses import dataclass

from dsde.policies.limits import LONGEST, check_real, check_whole
from dsde.policies.rounding import Rounding

LONGEST_WARMUP = 500


@dataclass(frozen=True, slots=True)
class Preset:
    """Every constant of the method; `PAPER` and `RELEASE` are the two published sets."""

    name: str
    decay: float
    """weight of a KLD relative to the one verified after it"""
    short: int | None
    """KLDs in the short window; None: a third of those held"""
    long: int | None
    """KLDs in the long window; None: as many as the warm-up"""
    divide_by_temperature: bool
    """whether the scale factor divides the mean KLD by the temperature of the request, where that is above 0"""
    kld_weight: float
    """of mean / max KLD in SL_max"""
    round_sl_max: bool
    min: int
    """least SL_min, and lower bound of SL_max"""
    min_share: float
    """SL_min is at least this part of SL_max, rounded up"""
    max: int
    """upper bound of SL_max and of the lengths tried while calibrating"""
    rounding: Rounding
    flat_wvir: float
    """WVIR where the long window is constant"""
    flat_short: bool
    """whether that also holds where only the short window is"""
    lone_wvir: float
    """WVIR where fewer than two KLDs are held"""
    initial: int
    """length at which a sequence starts to calibrate"""
    warmup: int = 30
    """drafted tokens to verify before a sequence is calibrated"""

    def __post_init__(self) -> None:
        # A sequence that drafts nothing shows no KLD, so a minimum of 0 could never be left again.
        check_whole("min", self.min, 1, LONGEST)
        check_whole("max", self.max, self.min, LONGEST)
        check_whole("initial", self.initial, 1, LONGEST)
        check_whole("warmup", self.warmup, 1, LONGEST_WARMUP)
        check_real("decay", self.decay, 0.01, 1.0)
        if self.long is not None:
            check_whole("long", self.long, 2, LONGEST_WARMUP)
        if self.short is not None:
            check_whole("short", self.short, 2, self.num_held)

    @property
    def num_held(self) -> int:
        """KLDs remembered of every sequence."""
        return self.warmup if self.long is None else self.long


PAPER = Preset(
    name="paper",
    decay=0.85,
    short=10,
    long=30,
    divide_by_temperature=False,
    kld_weight=1.0,
    round_sl_max=False,
    min=2,
    min_share=0.0,
    max=20,
    rounding="nearest",
    # Two windows of a constant are equally stable: the scale factor alone decides, so that a sequence constantly at 0
    # gets SL_max and one constantly far off gets SL_min. The paper does not say. The short window too: else ten tokens
    # of complete disagreement after a varied past (WVIR 0) would be taken for perfect stability.
    flat_wvir=1.0,
    flat_short=True,
    lone_wvir=1.0,
    initial=4,
)
RELEASE = Preset(
    name="release",
    decay=0.9,
    short=None,
    long=None,
    divide_by_temperature=True,
    kld_weight=0.5,
    round_sl_max=True,
    min=6,
    min_share=0.1,
    max=20,
    rounding="ceil",
    flat_wvir=20.0,
    flat_short=False,
    lone_wvir=0.0,
    initial=6,
)
PRESETS = {preset.name: preset for preset in (PAPER, RELEASE)}
