"""What `Advisor` says of a batch: a plan, and why it was made, which is what its outcome teaches something about.

Knows how to be of use to a batch that is nearly the one it was made for.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from dsde.core.stops import StopByWorth
from dsde.policies.base import BatchView, IntArray, Plan
from dsde.policies.occasions import Occasions
from dsde.policies.waves import NUM_IN_PASSING


@dataclass(slots=True)
class Advice:
    """A plan, whether it is followed or not."""

    batch: BatchView
    """that it is for: as it was then, and once it is followed as it is"""
    plan: Plan
    """as it was thought of"""
    planned_rate: float
    """tokens per second while drafting; 0: not everybody drafts who would, or only to look"""
    rule: StopByWorth | None
    """by which drafts end, or would if somebody looked at them; None: nobody drafts, or only to look"""
    is_probing: bool
    is_blind: bool
    """made without drafts to have that measured"""
    is_roomless: bool
    """made when nobody had room for a draft, which says nothing of whether drafts pay"""
    is_doubtful: bool
    """made with drafts that do not seem to pay"""
    foregone_s: float
    """that drafting is believed to save, and nobody does"""
    is_partial: bool = False
    """made for a part of those who are to draft: the draft has much to read for the others"""
    wave: IntArray = field(default_factory=lambda: np.empty(0, np.int64))
    """slots of some of these; what comes of theirs tells whether to read more"""
    is_waiting: bool = False
    """made without drafts, until it is known what came of these"""
    occasion: Occasions | None = None
    """for which it was made with other lengths than seem best, to see what they take now"""
    is_early: bool = False
    """made without drafts, since nobody knows what this would take without them, and prompts are read"""
    followed: Plan | None = None
    """the plan as it was handed out last, and stages have changed it"""

    @property
    def is_ruled(self) -> bool:
        """Whether somebody looks at drafts."""
        return self.plan.stop is not None

    @property
    def can_be_repeated(self) -> bool:
        """Whether it is as good for another step: everybody drafts, and that seems to pay."""
        return self.rule is not None and not (self.is_doubtful or self.is_partial or self.occasion is not None)

    def follow(self, batch: BatchView) -> Plan:
        """Its plan, to be changed by whoever it is handed to, for this batch."""
        lengths = np.minimum(self.plan.lengths, batch.rooms)
        self.batch = batch
        self.followed = replace(self.plan, lengths=lengths, signals=dict(self.plan.signals))
        return self.followed

    def end_rest(self) -> int:
        """No step of a rest is announced any more. Returns how many were."""
        num_resting, self.plan.num_resting = self.plan.num_resting, 0
        if self.followed is not None:
            self.followed.num_resting = 0
        return num_resting

    @property
    def lengths(self) -> IntArray:
        """[batch] tokens that drafts were allowed to have in the end."""
        return (self.followed or self.plan).lengths

    def fits(self, batch: BatchView) -> bool:
        mine = self.batch
        # Drafts that pay do so beside prompts as well, which are read anyway.
        is_alike = mine.num_prompt_tokens == batch.num_prompt_tokens or self.can_be_repeated
        # Whoever joins decides on what is worth reading, if there is anything to read.
        has_to_read = batch.num_missed is not None and bool((batch.num_missed > NUM_IN_PASSING).any())
        is_alike = is_alike and (mine.num_joining == batch.num_joining or not has_to_read)
        return is_alike and mine.num_decoding == batch.num_decoding and np.array_equal(mine.slots, batch.slots)

    def resting_on(self, batch: BatchView, places: IntArray, num_resting: int) -> Advice:
        """The same rest for others: [batch] `places` are where they were in the batch before, -1: nowhere."""
        plan = Plan.wanting(0, batch)
        plan.signals = {
            name: np.where(places >= 0, values[places], np.nan) for name, values in self.plan.signals.items()
        }
        plan.num_resting = num_resting
        share = batch.num_sequences / self.batch.num_sequences
        return replace(self, batch=batch, plan=plan, foregone_s=share * self.foregone_s)

    def drafting_on(self, batch: BatchView, places: IntArray) -> Advice:
        """The same drafts for those who are left of a batch, at these places of it; -1: who was not there has none."""
        was_there, rule = places >= 0, self.rule
        if rule is not None:
            usual = None if rule.usual is None else np.where(was_there, rule.usual[places], 0)
            rule = replace(rule, offsets=rule.offsets[places], outlooks=rule.outlooks[places], usual=usual)
        plan = replace(
            self.plan,
            lengths=np.where(was_there, np.minimum(self.plan.lengths[places], batch.rooms), 0),
            predicted=np.where(was_there, self.plan.predicted[places], 0.0),
            votes=self.plan.votes[places] & was_there,
            signals={name: np.where(was_there, values[places], np.nan) for name, values in self.plan.signals.items()},
            stop=rule if self.is_ruled else None,
        )
        rate = self.planned_rate * batch.num_sequences / self.batch.num_sequences if was_there.all() else 0.0
        return replace(self, batch=batch, plan=plan, rule=rule, planned_rate=rate)
