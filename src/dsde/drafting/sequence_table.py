"""What the device must know of every sequence, in arrays by slot, so that a step's inputs are gathered and not looped.

Mirrors block tables and sampling parameters; the sequences stay the truth. Knows nothing of devices.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dsde.core.params import LONGEST_DRAFT
from dsde.core.sequence import Sequence
from dsde.device.staging import Sheet
from dsde.models.batch import BLOCK_SIZE
from dsde.sampling.draw_mode import DrawMode

IntArray = NDArray[np.int64]

DRAW_FIELDS = ("seeds", "counters", "modes", "inv_temperatures", "top_ks", "top_ps", "min_ps")


COUNTERS_PER_STEP = 2 * LONGEST_DRAFT
"""Random numbers of one step's depths must not be those of another's."""

_PRIVATE = ("_min_lens", "_generations")


class SequenceTable:
    def __init__(self, max_blocks: int) -> None:
        self.max_blocks = max_blocks
        self._owners: list[Sequence | None] = []
        self._lists: list[list[int] | None] = []
        self._known: list[int] = []
        self._blocks = np.zeros((0, 0), dtype=np.int32)
        self._generations = np.zeros(0, dtype=np.int64)
        """how many sequences a slot has had"""
        self._min_lens = np.zeros(0, dtype=np.int64)
        """tokens that a sequence must have before it may stop"""
        self.edits = np.zeros(0, dtype=bool)
        """whose logits are edited by their own tokens"""
        self.seeds = np.zeros((0, 2), dtype=np.int32)
        self.modes = np.zeros(0, dtype=np.int32)
        self.inv_temperatures = np.ones(0, dtype=np.float32)
        self.top_ks = np.zeros(0, dtype=np.int32)
        self.top_ps = np.ones(0, dtype=np.float32)
        self.min_ps = np.zeros(0, dtype=np.float32)
        self.truncates = np.zeros(0, dtype=bool)

    def update(self, sequences: list[Sequence]) -> IntArray:
        """Take over what changed; returns the slots of these sequences."""
        slots = np.array([s.slot for s in sequences], dtype=np.int64)
        self._grow(int(slots.max()) + 1, max([len(s.block_table) for s in sequences]))
        owners, lists, known, blocks = self._owners, self._lists, self._known, self._blocks
        for sequence in sequences:
            slot, table = sequence.slot, sequence.block_table
            if owners[slot] is not sequence:
                self._take_over(sequence)
            # Blocks of tokens that are computed stay; those after them may have been given back and taken anew. A
            # preemption leaves a new list.
            start = sequence.num_computed // BLOCK_SIZE
            if lists[slot] is not table:
                start, lists[slot] = 0, table
            elif known[slot] < start:
                start = known[slot]
            count = len(table)
            if start == count - 1:
                blocks[slot, start] = table[start]
            else:
                blocks[slot, start:count] = table[start:]
            known[slot] = count
        return slots

    def tables(self, slots: IntArray, num_blocks: int) -> NDArray[np.int32]:
        """[slots, num_blocks] block ids; what lies beyond a sequence's own table is stale."""
        return self._blocks[slots, :num_blocks]

    def any_edited(self, sequences: list[Sequence], slots: IntArray) -> bool:
        """Whether somebody's logits depend on more than the model and the sampling parameters."""
        if self.edits[slots].any():
            return True
        min_lens = self._min_lens[slots]
        return bool(min_lens.any()) and bool((min_lens > [s.num_tokens for s in sequences]).any())

    def write_draws(self, sheet: Sheet, slots: IntArray, counters: IntArray) -> None:
        """Sampling parameters of these sequences; the rest of a sheet is padding."""
        host, count = sheet.arrays, len(slots)
        host["counters"][:count] = counters
        if not sheet.is_new("draws", slots, self._generations[slots]):
            return
        host["seeds"][: 2 * count] = self.seeds[slots].ravel()
        host["modes"][:count] = self.modes[slots]
        host["modes"][count:] = DrawMode.PADDING
        for name in ("inv_temperatures", "top_ks", "top_ps", "min_ps"):
            host[name][:count] = getattr(self, name)[slots]

    def counters(self, sequences: list[Sequence], sampled: bool, num_steps_later: int = 0) -> IntArray:
        """Where in its own random numbers a sequence stands: at a position if seeded, else at a step, since a position
        that is drafted again needs fresh ones."""
        if not sampled:
            return np.zeros(len(sequences), dtype=np.int64)
        spacing = COUNTERS_PER_STEP
        return np.array(
            [s.num_output_tokens if s.coupled else (s.num_steps + num_steps_later) * spacing for s in sequences],
            dtype=np.int64,
        )

    def variant(self, slots: IntArray) -> tuple[bool, bool]:
        """Whether anybody samples, and whether anybody truncates."""
        if not self.modes[slots].any():
            return False, False
        return True, bool(self.truncates[slots].any())

    def _take_over(self, sequence: Sequence) -> None:
        slot, params = sequence.slot, sequence.params
        self._owners[slot] = sequence
        self._lists[slot] = None
        self._generations[slot] += 1
        self.edits[slot] = bool(params.logit_bias) or params.has_penalties
        self._min_lens[slot] = sequence.num_prompt_tokens + params.min_tokens if params.min_tokens else 0
        self.seeds[slot] = np.array([sequence.stream], dtype=np.uint64).view(np.int32)
        self.modes[slot] = DrawMode.GREEDY if params.greedy else DrawMode.MATCH if sequence.coupled else DrawMode.RATIO
        self.inv_temperatures[slot] = 1.0 if params.greedy else 1.0 / params.temperature
        self.top_ks[slot] = max(params.top_k, 0)
        self.top_ps[slot] = params.top_p
        self.min_ps[slot] = params.min_p
        self.truncates[slot] = params.top_k > 0 or params.top_p < 1 or params.min_p > 0

    def _grow(self, num_slots: int, num_blocks: int) -> None:
        have, width = self._blocks.shape
        if num_slots <= have and num_blocks <= width:
            return
        more = max(num_slots, 2 * have) - have if num_slots > have else 0
        new_width = min(max(num_blocks, 2 * width), self.max_blocks) if num_blocks > width else width
        self._blocks = np.pad(self._blocks, ((0, more), (0, new_width - width)))
        self._owners += [None] * more
        self._lists += [None] * more
        self._known += [0] * more
        self.seeds = np.pad(self.seeds, ((0, more), (0, 0)))
        for name in ("modes", "inv_temperatures", "top_ks", "top_ps", "min_ps", "truncates", "edits", *_PRIVATE):
            setattr(self, name, np.pad(getattr(self, name), (0, more)))


def draw_sizes(count: int) -> dict[str, int]:
    """How much room `write_draws` needs in a section."""
    return {name: 2 * count if name == "seeds" else count for name in DRAW_FIELDS}
