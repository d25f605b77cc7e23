"""Drafted tokens on a device: where they lie, how far each sequence's go, and what is proposed in the end.

The host hands out rows of the store and never sees a token. Knows nothing of passes.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray

from dsde.drafting.ruling import Decision
from dsde.sampling.kernels import NUM_SIGNALS, DraftStore

BoolArray = NDArray[np.bool_]
FloatArray = NDArray[np.float32]
IntArray = NDArray[np.int64]

_FIRST_STORE_ROWS = 64


@dataclass(slots=True)
class DeviceProposals:
    """Drafted tokens that only the device knows."""

    lengths: IntArray
    """[sequences]"""
    rows: IntArray
    """[sequences, K] where in the draft store a token lies; -1 beyond a sequence's length"""
    num_catch_up_tokens: IntArray | None = None
    """[sequences] tokens the draft had to read before its first own one, beyond the newest"""
    point_mass: bool = False
    """chosen rather than drawn from a distribution: nothing but the tokens is in the store"""
    is_caught_up: BoolArray | None = None
    """[sequences] the draft has read all of their tokens but perhaps the last one drafted; None: nobody's"""
    num_passes: int = 0
    """as in Proposals"""
    is_resumed: bool = False
    """no first token had been drawn ahead: the device waited for the host to begin"""
    signals: FloatArray | None = None
    """[rows of the store, NUM_SIGNALS] on the host; None: nobody asked"""

    @staticmethod
    def nothing(num_sequences: int) -> DeviceProposals:
        return DeviceProposals(np.zeros(num_sequences, dtype=np.int64), np.empty((num_sequences, 0), dtype=np.int64))

    def cut(self, lengths: IntArray) -> DeviceProposals:
        """The beginnings of the drafts, so much of each."""
        return replace(self, lengths=lengths, rows=_beginnings(self.rows, lengths))

    def signals_of_drafts(self) -> NDArray[np.float64] | None:
        """[sum(lengths), NUM_SIGNALS] sequence after sequence."""
        return None if self.signals is None else self.signals[self.rows[self.rows >= 0]].astype(np.float64)


@dataclass(slots=True)
class Drafts:
    """The draft store, which grows with the number of tokens drafted in a step."""

    vocab_size: int
    dtype: torch.dtype
    tokens: torch.Tensor
    """[most drafted tokens of a step] never moves"""
    store: DraftStore | None = field(init=False, default=None)
    """None: there was no memory for it"""
    num_moves: int = field(init=False, default=0)
    """how often the store has moved: no graph captured before may be used again"""
    _signals: torch.Tensor = field(init=False, default_factory=lambda: torch.empty((0, NUM_SIGNALS)))
    """the store's, on the host"""

    def __post_init__(self) -> None:
        self._allocate(_FIRST_STORE_ROWS)

    @property
    def signals(self) -> torch.Tensor:
        """[capacity, NUM_SIGNALS] on the device"""
        assert self.store is not None
        return self.store.signals

    def fetch_signals(self, num_rows: int, wait: bool) -> FloatArray:
        """[num_rows, NUM_SIGNALS] of the store's first rows, on the host: now, or when the step is over."""
        if len(self._signals) < num_rows:
            is_cuda = self.tokens.device.type == "cuda"
            self._signals = torch.empty((self.capacity, NUM_SIGNALS), pin_memory=is_cuda)
        found = self._signals[:num_rows]
        found.copy_(self.signals[:num_rows], non_blocking=not wait)
        values: FloatArray = found.numpy()
        return values

    @property
    def capacity(self) -> int:
        return self.store.logits.shape[0] if self.store is not None else 0

    def make_room(self, num_rows: int, num_kept: int = 0) -> None:
        """Move the store to where there is room for that many rows; all that it held but the first few rows is lost."""
        capacity = max(num_rows, 2 * self.capacity)
        kept = self.store if num_kept else None
        self.num_moves += 1
        # The old one goes first, if it can: both at once would need half as much again.
        self.store = None
        self._allocate(capacity)
        if kept is not None and self.store is not None:
            for name in ("logits", "stats", "thresholds", "signals"):
                getattr(self.store, name)[:num_kept] = getattr(kept, name)[:num_kept]

    def _allocate(self, capacity: int) -> None:
        self.store = DraftStore.allocate(capacity, self.vocab_size, self.dtype, self.tokens.device)
        self.store.tokens = self.tokens


class GrowingDraft:
    """Drafts of a step while they are made."""

    def __init__(self, lengths: IntArray, ahead: IntArray) -> None:
        self.lengths = lengths
        """[sequences] how far they go, for all that is known"""
        self.longest = int(lengths.max(initial=0))
        self.rows = np.full((len(lengths), self.longest), -1, dtype=np.int64)
        """[sequences, depths] where in the store the tokens drawn so far lie, those of ended drafts included"""
        self.num_rows = int(ahead.max()) + 1
        """of the store, that are taken"""
        self.depth = 0
        """of the newest tokens"""
        self.members = np.argsort(-lengths, kind="stable")[: int((lengths > 0).sum())]
        """sequences that have a token of this depth, longest first"""
        self._has_ended = False
        """some before their length"""
        if self.longest:
            self.rows[:, 0] = ahead

    @property
    def may_go_on(self) -> BoolArray:
        """[members]"""
        goes_on: BoolArray = self.lengths[self.members] > self.depth + 1
        return goes_on

    def draw(self, members: IntArray) -> None:
        """A pass draws a token for each of these at the present depth."""
        if len(members):
            self.rows[members, self.depth] = np.arange(self.num_rows, self.num_rows + len(members))
            self.num_rows += len(members)

    def deepen(self, members: IntArray) -> None:
        """A pass draws another token for these of the members."""
        self.depth += 1
        self.members = members
        self.draw(members)

    @property
    def is_drafting(self) -> BoolArray:
        """[members] those who had not ended before their newest token, and only rode along"""
        is_drafting: BoolArray = self.lengths[self.members] > self.depth
        return is_drafting

    def end(self) -> None:
        """All are over, with what they have."""
        self.apply(np.full(len(self.members), Decision.KEPT))

    def apply(self, decisions: IntArray) -> None:
        """What was decided on the members' newest tokens."""
        ends = self.is_drafting & (decisions < Decision.GOES_ON)
        self.lengths[self.members[ends]] = self.depth + decisions[ends]
        self._has_ended = True

    def proposals(self) -> DeviceProposals:
        rows = _beginnings(self.rows, self.lengths) if self._has_ended else self.rows
        return DeviceProposals(self.lengths, rows)

    def proposals_if_over(self, keeps_last: bool) -> DeviceProposals:
        """The same if all that are still drafting end now, with or without their newest tokens."""
        lengths = self.lengths.copy()
        lengths[self.members] = np.minimum(lengths[self.members], self.depth + keeps_last)
        return DeviceProposals(lengths, _beginnings(self.rows, lengths))


def _beginnings(rows: IntArray, lengths: IntArray) -> IntArray:
    """Of every row so much, -1 behind it."""
    longest = int(lengths.max(initial=0))
    return np.where(np.arange(longest) < lengths[:, None], rows[:, :longest], -1)
