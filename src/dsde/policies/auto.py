"""`auto`: every further token of every sequence must earn more than it costs. See docs/auto.md.

What pays is the advisor's matter; this is about when it thinks: while the device is busy, and not while it waits. So
steps are learnt from later, rests and drafts go on for those who are left of a batch, and where there is hardly any
time a plan serves for several steps. Knows nothing of models, of tokens or of what is being written.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby

import numpy as np

from dsde.policies.advice import Advice
from dsde.policies.advisor import NUM_TRIED, Advisor
from dsde.policies.base import BatchView, BoolArray, IntArray, Need, Outcome, Plan, Policy
from dsde.policies.cost import CostModel
from dsde.policies.limits import LONGEST, check_whole
from dsde.policies.thinking import Thinking
from dsde.policies.verifications import size_of_batch

MOST_REPEATS = 2
"""of a plan, one after the other, where there is hardly any time to think of another"""
MOST_LATE = 2
"""steps that may be learnt from when the next one has been planned"""


class Auto(Policy):
    """Lengths for the whole batch that bring the most tokens per second, and a stop where a token turns out risky.

    What a step taught is worked into the next plan but one: in `settle`, while the device is busy with the next.
    """

    needs = Need.DRAFT_SIGNALS

    def __init__(self, max: int = 20, cost: CostModel | None = None) -> None:
        check_whole("max", max, 1, LONGEST)
        self.max = max
        # One measurement may be an accident, and whoever it puts off would never make another.
        self.cost = cost or CostModel(num_tried=NUM_TRIED, is_flat_below=True)
        self.advisor = Advisor(max, self.cost)
        self._current: Advice | None = None
        self._next: Advice | None = None
        self._num_observed = 0
        """outcomes of the current plan"""
        self._num_settled = 0
        """of them, when the next plan was last thought of"""
        self._num_rested = 0
        """steps that they stand for"""
        self._num_left = 0
        """steps of a rest that ended with a request"""
        self._num_joined = 0
        """requests since there was last thought of a plan"""
        self._num_put_off = 0
        """times that no plan was thought of, one after the other, for lack of time"""
        self._is_settled = False
        """whether somebody calls `settle` behind every plan"""
        self._is_pressed = False
        """whether there is hardly any time to think, as far as is known"""
        self.thinking = Thinking()
        """where nobody calls `settle`: the machine waits for it"""
        self._unlearnt: list[tuple[Outcome, Advice]] = []
        self._seen: BatchView | None = None
        """the newest batch of which there was asked"""
        self._num_late = 0
        """of the outcomes to be learnt, that were there before: what is known of that batch has them in it"""
        self._gone: set[int] = set()
        """slots of sequences that have ended, to be forgotten when what was seen of them is learnt"""

    @property
    def cost_models(self) -> list[CostModel]:
        return [self.cost]

    def plan(self, batch: BatchView) -> Plan:
        num_put_off = self._num_put_off
        with self.thinking:
            plan = self._plan(batch)
        if num_put_off and not self._num_put_off:
            self.thinking.end()
        return plan

    def _plan(self, batch: BatchView) -> Plan:
        current = self._current
        if current is not None and not self._num_observed:
            self.advisor.drop(current)  # its step failed, or all who were in it are gone
        # A device may be waiting; but what a rest missed must not be counted behind what is missed by now.
        num_late = sum(outcome.num_steps for outcome, _ in self._unlearnt) if self._num_rested > 1 else 0
        is_same = num_late > 0 and current is not None and current.fits(batch)
        if num_late > MOST_LATE or is_same or not self._gone.isdisjoint(batch.slots.tolist()):
            self._learn()
        self._seen, self._num_late = batch, len(self._unlearnt)
        has_missed = self.cost.see(batch)
        is_new = self.advisor.meet(batch)
        has_met = bool(is_new.any())
        if current is not None and not has_missed and current.fits(batch):
            if self._rests():
                current.plan.num_resting -= self._num_rested
                return self._follow(current, batch)
            if self._num_put_off and not has_met and current.can_be_repeated:
                return self._follow(current, batch)
        if (plan := self._rest_on(batch, is_new)) is not None:
            return plan
        # A look was taken into account when the one behind it was planned, whatever it had to read.
        is_expected = self._next is not None and self._next.is_probing
        if self._next is not None and ((has_missed and not is_expected) or not self._next.fits(batch)):
            self._drop_next()
        if self._next is None and (plan := self._draft_on(batch, is_new)) is not None:
            return plan
        if self._num_put_off and not self._is_settled:
            self._num_put_off = 0
            self._learn()
        advice = self._next or self.advisor.advise(batch)
        self._next = None
        self._num_left = self._num_joined = 0
        plan = self._follow(advice, batch)
        self.advisor.take(advice)
        return plan

    def _follow(self, advice: Advice, batch: BatchView) -> Plan:
        """Its plan is that of the next step, of which nothing has been seen yet."""
        self._current = advice
        self._num_observed = self._num_settled = self._num_rested = 0
        self._is_settled = False
        return advice.follow(batch)

    def observe(self, outcome: Outcome) -> None:
        if not self._is_settled and not self._rests():
            self._think_of(outcome)
        if self._current is not None:
            self._unlearnt.append((outcome, self._current))
        self._num_observed += 1
        self._num_rested += outcome.num_steps
        if self._num_observed > self._num_settled + 1:  # all rested: what was thought of before that is old
            self._drop_next()

    def _think_of(self, outcome: Outcome) -> None:
        """Nobody calls `settle`, and the machine waits: what was seen is learnt, and the next step planned anew; or
        both are put off, where they would take too much of the time."""
        self.thinking.count(outcome.step_s)
        current = self._current
        can_wait = current is not None and current.can_be_repeated
        if can_wait and self._num_put_off < self.thinking.num_repeats(MOST_REPEATS):
            self._num_put_off += 1
            return
        self._num_put_off = 0
        with self.thinking:
            self._learn()
        self.thinking.end()

    def settle(self, coming: BatchView | None = None, is_pressed: bool = False) -> None:
        self._drop_next()  # made for a step that had nobody to plan for
        self._is_settled, self._is_pressed = True, is_pressed
        current = self._current
        is_pressed = is_pressed and coming is None and current is not None and current.can_be_repeated
        if is_pressed and self._num_put_off < MOST_REPEATS:
            self._num_put_off += 1
            self._learn()
            return
        if not (is_pressed and self._num_put_off):  # one thing at a time
            self._learn()
        self._num_put_off = 0
        self._num_settled = self._num_observed
        if coming is not None and not self._would_rest_on(coming):
            self.cost.see(coming)
            self._next = self.advisor.advise(coming)
        elif coming is None and current is not None and self._num_rested >= current.plan.num_resting:
            # Those of a wave are taken not to have read anything yet.
            self._next = None if current.wave.size else self.advisor.advise(replace(current.batch, num_joining=0))

    def rules_on(self) -> bool:
        return self._next is None or self._next.is_ruled

    def _rests(self) -> bool:
        """Whether this is one of the steps that the current plan announced, and somebody asks all the same."""
        return self._current is not None and 0 < self._num_rested <= self._current.plan.num_resting

    def _would_rest_on(self, batch: BatchView) -> bool:
        """Whether nothing need be thought of for it, with a step of the rest under way."""
        current = self._current
        if current is None:
            return False
        num_left = self._num_left or current.plan.num_resting - self._num_rested - 1
        is_new = self.advisor.lifespan.is_new(batch.slots)
        return num_left > 0 and self._places(batch, current.batch, is_new) is not None

    def _rest_on(self, batch: BatchView, is_new: BoolArray) -> Plan | None:
        """The same rest for those who are left of it, and whoever has joined them: requests end and begin in any step,
        and a device waits for every thought. None: there is none, or they are others, or so few, or so many, that what
        pays is another matter."""
        current = self._current
        if current is None:
            return None
        num_left = self._num_left or current.plan.num_resting - self._num_rested
        if num_left <= 0 or (places := self._places(batch, current.batch, is_new)) is None:
            return None
        self._num_left = 0
        self._num_joined += int(np.count_nonzero(is_new))
        self._drop_next()
        return self._follow(current.resting_on(batch, places, num_left), batch)

    def _draft_on(self, batch: BatchView, is_new: BoolArray) -> Plan | None:
        """The same drafts for those who are left of a batch when somebody ends, where there is hardly any time to think
        of others. Who has joined meanwhile does not draft yet."""
        current = self._current
        if current is None or not self._is_pressed or not current.can_be_repeated:
            return None
        # With all who were there nobody has ended, and there was time for another plan.
        if batch.slots.size >= current.batch.slots.size and not is_new.any():
            return None
        places = self._places(batch, current.batch, is_new)
        if places is None or (places < 0).all():
            return None
        self._num_joined += int(np.count_nonzero(is_new))
        return self._follow(current.drafting_on(batch, places), batch)

    def _places(self, batch: BatchView, before: BatchView, is_new: BoolArray) -> IntArray | None:
        """[batch] where everybody was in the batch before, -1 for who is new; None: not all others were there, those
        who have joined since it was last thought of a plan are not few, or the batch has become another size."""
        num_joined = self._num_joined + int(np.count_nonzero(is_new))
        is_alike = (
            batch.num_decoding - batch.slots.size == before.num_decoding - before.slots.size
            and size_of_batch(before.num_sequences) == size_of_batch(batch.num_sequences)
            and 2 * num_joined <= batch.slots.size
        )
        if not is_alike:
            return None
        known = {slot: place for place, slot in enumerate(before.slots.tolist())}
        places = np.array([known.get(slot, -1) for slot in batch.slots.tolist()], dtype=np.int64)
        places[is_new] = -1  # a slot is given to somebody else
        return places if (is_new | (places >= 0)).all() else None

    def forget(self, slots: IntArray) -> None:
        # A device may be waiting: learning has time until there is somebody new.
        self._gone.update(slots.tolist())
        if not self._unlearnt:
            self._learn()
        if self._next is not None and np.isin(self._next.batch.slots, slots).any():
            self._drop_next()
        if self._current is not None and self._current.plan.num_resting:
            # Announced for as long as nobody ends; but who is left may go on with it.
            self._num_left = max(self._current.end_rest() - self._num_rested, 0)

    def _drop_next(self) -> None:
        if self._next is not None:
            self.advisor.drop(self._next)
        self._next = None

    def _learn(self) -> None:
        late, newer = self._unlearnt[: self._num_late], self._unlearnt[self._num_late :]
        self._unlearnt, self._num_late = [], 0
        for outcome, advice in _told_together(late):
            self.advisor.learn(outcome, advice)
        if late and self._seen is not None:  # or they would count twice
            self.cost.see(self._seen)
            self.advisor.lifespan.see(self._seen.slots, self._seen.num_left)
        for outcome, advice in _told_together(newer):
            self.advisor.learn(outcome, advice)
        if self._gone:
            slots = np.array(sorted(self._gone))
            self._gone.clear()
            self.advisor.forget(slots)


def _told_together(told: list[tuple[Outcome, Advice]]) -> Iterator[tuple[Outcome, Advice]]:
    """Steps of a rest as one: nothing depends on them before it is over, and where a step is short a device would wait
    for what is learnt of each."""
    for _, group in groupby(told, key=lambda each: id(each[1])):
        outcomes, advices = zip(*group, strict=True)
        if len(outcomes) == 1 or any(outcome.has_drafts for outcome in outcomes):
            yield from zip(outcomes, advices, strict=True)
            continue
        timed = [outcome for outcome in outcomes if outcome.verify_s > 0]
        untimed = [outcome for outcome in outcomes if not outcome.verify_s > 0]
        # Those first of whom one was the first.
        for alike in filter(None, (timed, untimed) if outcomes[0].verify_s > 0 else (untimed, timed)):
            verify_s = statistics.median_low(outcome.verify_s for outcome in alike)
            num_steps = sum(outcome.num_steps for outcome in alike)
            prompt_steps = [step for outcome in alike for step in outcome.prompt_steps]
            together = replace(alike[-1], verify_s=verify_s, num_steps=num_steps, prompt_steps=prompt_steps)
            # If nobody knows of one of them, it would be taken for a part of the others.
            seconds = [outcome.step_s for outcome in alike]
            together.step_s = sum(seconds) if all(seconds) else 0.0
            yield together, advices[-1]
