"""Looking again while nobody drafts: a small share of the time pays for a short draft now and then.

Without it, a policy that has stopped drafting would never learn that it should begin again. Knows nothing of what is
learnt from a probe.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from dsde.policies.base import BatchView, BoolArray, IntArray
from dsde.policies.cost import CostModel, StepCost
from dsde.policies.lifespan import Lifespan
from dsde.policies.slots import SlotTable

SHARE = 0.01
"""of the time without speculation, that may go into probes; and of that which those who are new will take"""
MOST_STEPS = 2.0
"""without drafts, that a probe is taken to cost at most"""
MOST_READING = 0.5
"""steps without drafts, that reading may take before one that is tried on credit"""
MOST_UNTIMED = 4
"""probes one after the other that nobody timed, because they compiled, and that the next one follows at once: it will
not compile any more. Further ones are paid for as expected, or else they might go on for ever"""
MOST_PARDONS = 2
"""probes whose price is limited to twice what was expected: they may have compiled, or been held up"""
NUM_PER_PARDON = 8
"""probes after which there may be another such one"""
MOST_OWED = 512.0
"""steps without drafts: a machine may have slept meanwhile"""
LONGEST_REST = 256
"""steps without drafts, known to be such beforehand"""
LATER = 64
"""steps without drafts, over which it is seen how much dearer a probe becomes"""
NUM_TOKENS = 4
"""drafted in a probe, over the batch"""
NUMS = (1, 2, 4)
"""of sequences that may share them; or everybody drafts one"""


@dataclass
class _Sequences(SlotTable):
    is_known: BoolArray
    was_probed: BoolArray
    """since all were"""


class Probe:
    def __init__(self, cost: CostModel, max_length: int, lifespan: Lifespan | None = None) -> None:
        """With a `lifespan` those who are new bring some of the price of a probe: for who tells sequences apart."""
        self.cost = cost
        self.max_length = max_length
        self.lengths = np.zeros(0, np.int64)
        """of the draft that was last found the price of"""
        self._lifespan = lifespan
        self._num_open = 0
        """looks that were begun and not ended"""
        self._num_due = 0
        """further ones that belong to the last"""
        self._due_slots = np.zeros(0, np.int64)
        """of the batch that they are for"""
        self._in_pairs = False
        """whether drafts that begin from rest are told from others, so that one look by itself says little"""
        self._num_begun = self._num_ended = 0
        self._num_untimed = 0
        """of the newest"""
        self._tried = 0, 0
        """tokens that were last to be verified on credit, and how often they had been"""
        self._num_futile = 0
        """such looks, one after the other, that verified nothing: a draft may find nothing to propose"""
        self._share = 1.0
        """of what is usual, that newcomers bring"""
        self._saved_s = 0.0
        self._expected_s = 0.0
        """that the draft last thought of will take"""
        self._last_s = 0.0
        """that the last one took"""
        self._num_pardons = float(MOST_PARDONS)
        """that are left"""
        self._price_s = 0.0
        """that must have been saved for it"""
        self._dearer_s = 0.0
        """by which that is more after every step: there is more to read by then"""
        self._most_s = 0.0
        """but never more than this"""
        self._sequences = _Sequences(is_known=np.zeros(1, np.bool_), was_probed=np.zeros(1, np.bool_))

    @property
    def is_under_way(self) -> bool:
        return self._num_open > 0

    def is_due(self, batch: BatchView) -> bool:
        """Whether another look follows on the last one, which need not have ended."""
        return self._num_due > 0 and np.array_equal(self._due_slots, batch.slots)

    def begin(self, batch: BatchView, num_tried: int = 0, share: float = 1.0) -> bool:
        """Whether enough time is set aside for a short draft, as if nothing of it were accepted.

        What one token of everybody costs is tried on credit until it was drafted and verified `num_tried` times: what
        is thought of it may be wrong. Not so if the draft has much to read first. Those who are new bring `share` of
        what they would.
        """
        self._share = share
        if self.is_due(batch):
            self.lengths = np.minimum(self.lengths, batch.rooms)
            self._num_due -= 1
            self._num_open += int(self.lengths.any())
            return bool(self.lengths.any())
        self._num_open = self._num_due = 0
        if self._may_begin(batch, num_tried):
            self._num_open, self._num_due, self._due_slots = 1, int(self._in_pairs), batch.slots
            self._num_begun += 1
            self._sequences.was_probed[batch.slots[self.lengths > 0]] = True
        return self.is_under_way

    def is_on_credit(self, batch: BatchView, num_tried: int) -> bool:
        """Whether one token of everybody is to be tried: it was not drafted and verified so often yet. Not beside
        prompts, as part of something larger, nor if the draft has much to read first, or takes longer than its tokens
        could ever save, nor for ever where nobody measures it."""
        num_behind = self.cost.num_behind(batch.slots)
        num_drafted = int(np.minimum(batch.rooms, 1).sum())
        num_tokens = batch.num_sequences + num_drafted
        plain_s = float(self.cost.verify_s(batch.num_sequences))
        if self.cost.num_drafts >= num_tried and self.cost.drafting_s(num_drafted, 1) >= plain_s:
            return False
        is_untried = self.cost.num_verified(num_tokens) < num_tried
        if self._num_ended < 2 * num_tried:  # where every draft has something to read none tells what it takes itself
            is_untried = is_untried or self.cost.num_drafts < num_tried
        if not is_untried or batch.num_prompt_tokens or max(self._num_untimed, self._num_futile) > MOST_UNTIMED:
            return False
        return float(self.cost.catch_up_s(num_behind)) <= MOST_READING * plain_s

    def _may_begin(self, batch: BatchView, num_tried: int) -> bool:
        if not batch.rooms.any():
            return False
        self._sequences.cover(batch.slots)
        most_s = self._most_s = MOST_STEPS * float(self.cost.verify_s(batch.num_sequences))
        self._dearer_s = 0.0
        if self.is_on_credit(batch, num_tried):
            self.lengths = np.minimum(batch.rooms, 1)
            num_tokens = batch.num_sequences + int(self.lengths.sum())
            tried = num_tokens, self.cost.num_verified(num_tokens)
            self._num_futile = self._num_futile + 1 if tried == self._tried else 0
            self._tried = tried
            self._expected_s = self._cost_s(batch, self.lengths)
            self._price_s = min(self._expected_s, most_s)
            return True
        self._choose(batch, most_s)
        # However dear it looks: that may be what is wrong. What it does cost is paid for afterwards.
        self._price_s = min(self._expected_s, most_s)
        # Of everybody there will soon be too much to read, and few will do.
        drafting = batch.slots[self.lengths > 0][: NUMS[-1]]
        behind = self.cost.num_behind(drafting) + np.array([0, LATER * drafting.size])
        self._dearer_s = float(np.diff(self.cost.catch_up_s(behind))[0]) / LATER
        if self._lifespan is not None:
            self._welcome(batch, self._lifespan)
        self._saved_s = min(self._saved_s, 2 * self._price_s)
        return self._saved_s >= self._price_s

    def num_steps_left(self, plain_s: float) -> int:
        """Steps of so many seconds, without drafts, until there is enough for such a probe as was asked for last; no
        more than a rest may have."""
        # Or else it would not be enough by then, and again not after the few steps that were missing: whoever is asked
        # in between keeps a device waiting.
        missing_s, saved_s = self._price_s - self._saved_s, SHARE * plain_s
        num = (self._most_s - self._saved_s) / saved_s
        if saved_s > self._dearer_s:
            num = min(num, missing_s / (saved_s - self._dearer_s))
        return min(math.ceil(num), LONGEST_REST) if missing_s > 0 else 0

    def save(self, plain_s: float) -> None:
        """A step without drafts took so long."""
        self._saved_s += SHARE * plain_s

    def drop(self) -> None:
        """A look that was begun is not made, or nothing will come of it."""
        self._num_open = max(self._num_open - 1, 0)
        self.pass_over()

    def pass_over(self) -> None:
        """The next step is none: another look would not follow on the last."""
        self._num_due = 0

    def end(self, step: StepCost, plain_s: float, is_resumed: bool = False, delay_s: float = 0.0) -> None:
        """The step that was one took this, and would have taken `plain_s` without; or everybody was later for it by
        `delay_s`, if that is more. Debts have an end: it may have been held up, and nobody would look again for long.
        But not for ever: probes that are always dear are paid for. With `is_resumed` its draft began from rest, and may
        have taken longer than one that follows on another: from now on looks come in pairs.
        """
        self._in_pairs = self._in_pairs or is_resumed
        more_s = max(step.draft_s + step.catch_up_s + step.verify_s - plain_s, delay_s - step.beyond_s)
        is_timed = step.draft_s + step.catch_up_s > 0
        self._num_untimed = 0 if is_timed else self._num_untimed + 1
        if self._num_untimed > MOST_UNTIMED:
            more_s = self._expected_s
        self._num_pardons = min(self._num_pardons + 1 / NUM_PER_PARDON, MOST_PARDONS)
        paid_s = max(self._saved_s - max(more_s + step.beyond_s, 0.0), -MOST_OWED * plain_s)
        # What the last one took, too, is no accident.
        least_s = min(-2 * max(self._expected_s, self._last_s), self._saved_s)
        if paid_s < least_s and self._num_pardons >= 1:
            self._num_pardons -= 1
            paid_s = least_s
        self._saved_s, self._last_s = paid_s, more_s + step.beyond_s
        self._num_ended += 1
        self._num_open = max(self._num_open - 1, 0)

    def forget(self, slots: IntArray) -> None:
        if np.isin(self._due_slots, slots).any():
            self.pass_over()
        self._sequences.reset(slots)

    def _welcome(self, batch: BatchView, lifespan: Lifespan) -> None:
        """Those who were not there before bring some of the price: nobody knows how easy they are. Many are not all
        alike. Not more than the share of the time that they will take."""
        is_new = ~self._sequences.is_known[batch.slots]
        self._sequences.is_known[batch.slots] = True
        if is_new.any():
            num = batch.slots.size
            step_s = float(self.cost.verify_s(batch.num_sequences))
            most_s = SHARE * step_s * float(lifespan.num_left(batch)[is_new].sum()) / num
            self._saved_s += self._share * min(np.count_nonzero(is_new) / num**1.5 * self._price_s, most_s)

    def _choose(self, batch: BatchView, most_s: float) -> None:
        """A token of everybody, or a few of few, where much would have to be read first: those with the least to catch
        up, every other time of those who were not probed yet, and as many of them as tells most for its price, if every
        token stands as by a coin."""
        num_all = batch.slots.size
        can_all = float(self.cost.catch_up_s(self.cost.num_behind(batch.slots))) <= most_s
        behind = np.where(batch.rooms > 0, self.cost.behind(batch.slots), np.iinfo(np.int64).max)
        order = np.argsort(behind, kind="stable")[: np.count_nonzero(batch.rooms)]
        if self._num_begun % 2:  # or those who were looked at once would be looked at for ever
            was_probed = self._sequences.was_probed[batch.slots]
            if was_probed[order].all():
                was_probed[:] = False
                self._sequences.was_probed[batch.slots] = was_probed
            order = order[np.argsort(was_probed[order], kind="stable")]
        best = np.inf
        for num in (num_all,) if can_all else NUMS:
            lengths = np.zeros(num_all, np.int64)
            lengths[order[:num]] = min(max(NUM_TOKENS // num, 1), self.max_length)
            lengths = np.minimum(lengths, batch.rooms)
            price_s, num_tested = self._cost_s(batch, lengths), float((2 - 2 * 0.5**lengths).sum())
            if price_s < best * num_tested:
                best, self._expected_s, self.lengths = price_s / num_tested, price_s, lengths

    def _cost_s(self, batch: BatchView, lengths: IntArray) -> float:
        # Prompts are left out: they are read anyway, and beside them everything looks cheap.
        base, num_drafted = batch.num_sequences, int(lengths.sum())
        more_s = float(self.cost.verify_s(base + num_drafted)) - float(self.cost.verify_s(base))
        catch_up_s = float(self.cost.catch_up_s(self.cost.num_behind(batch.slots[lengths > 0])))
        return self.cost.drafting_s(num_drafted, int(lengths.max())) + more_s + catch_up_s
