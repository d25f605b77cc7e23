"""What a length policy sees, what it answers, and how stages compose with it.

NumPy only. Knows nothing of models, tokens or KV blocks. Everything is an array over the sequences of one step; a
sequence is known by its `slot`, a small integer that stays with it until it ends, preemption included.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from enum import Flag, auto
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from dsde.core.consultant import Consultant
from dsde.core.selection import VerifyBudget
from dsde.core.stops import Stop

if TYPE_CHECKING:
    from dsde.policies.cost import CostModel

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]

FOREVER = 1 << 30
"""more steps than any request has"""


class Need(Flag):
    """Signals a policy asks for; the engine computes only what somebody needs."""

    NOTHING = 0
    KLD = auto()
    TOKEN_PROB = auto()
    DRAFT_SIGNALS = auto()
    PACE = auto()


@dataclass(slots=True)
class Pace:
    """How fast sequences should go, and how fast they have gone since their first token."""

    tpot_s: FloatArray
    """[batch] seconds a token that the request asked for; infinite: it did not ask"""
    elapsed_s: FloatArray
    """[batch] since its first token"""
    num_emitted: IntArray
    """[batch] tokens since then, the first one not counted"""


class _Counted:
    """How much a step does even if nobody drafts."""

    __slots__ = ()

    slots: IntArray
    num_decoding: int
    num_prompt_tokens: int

    @property
    def num_sequences(self) -> int:
        """That get a token."""
        return max(self.num_decoding, self.slots.size)

    @property
    def num_plain_tokens(self) -> int:
        """That its pass reads."""
        return max(self.num_sequences + self.num_prompt_tokens, 1)


@dataclass(slots=True)
class BatchView(_Counted):
    """The decoding sequences whose length this policy chooses, before anything is drafted. Written by the engine."""

    slots: IntArray
    rooms: IntArray
    """most tokens that may be drafted: what is left of max_tokens and of the context"""
    temperatures: FloatArray
    num_decoding: int
    """all sequences that decode in this step, also those whose request fixed its own length"""
    num_waiting: int = 0
    num_prompt_tokens: int = 0
    """tokens of prompts that the same target pass reads"""
    num_joining: int = 0
    """sequences of whose prompts that pass reads the last, and who decode in the next step"""
    num_left: IntArray | None = None
    """[batch] tokens that each may have yet, at most; None: nobody knows"""
    num_missed: IntArray | None = None
    """[batch] tokens that the draft would have to read before it drafts, because nobody drafted when they came; None:
    nobody counts them"""
    pace: Pace | None = None
    """None unless Need.PACE"""
    favours_one_length: bool = False
    """whether all are in every draft pass, and drafts of one length are verified faster than ones that differ"""
    has_whole_passes: bool = False
    """whether all are in every pass of a draft that a rule may end, whoever still drafts: fewer save nothing of it"""


@dataclass(slots=True)
class Plan:
    """Lengths for one step. A policy creates it, stages change `lengths` (and `cap`), the engine obeys it."""

    lengths: IntArray
    """[batch] tokens to draft, 0 allowed; never more than the room"""
    predicted: FloatArray
    """[batch] the length the policy wants, before rounding, room and caps"""
    votes: BoolArray
    """[batch] whose prediction counts for, and is bound by, batch-wide stages (a calibrating sequence has none yet)"""
    cap: float | None = None
    """what a batch-wide stage limited the lengths to"""
    signals: dict[str, FloatArray] = field(default_factory=dict)
    """named per-sequence signals behind the prediction, for the trace; NaN where there is none yet"""
    num_lowered: int = 0
    """sequences whose length some stage lowered"""
    stop: Stop | None = None
    """ends drafts before their length is reached; its thresholds are in the order of the batch"""
    budget: VerifyBudget | None = None
    """how much of what was drafted the batch may have verified"""
    consultant: Consultant | None = None
    """accepts more than is lossless"""
    wants_signals: bool = True
    """whether drafts that no rule may end are to be looked at as well, where that takes time: on a CPU"""
    num_resting: int = 0
    """steps after this one in which nobody will draft either, whatever comes of it, as long as nobody joins or ends: a
    device may be given them before this one is over"""

    @classmethod
    def wanting(cls, wanted: IntArray | int, batch: BatchView, **signals: FloatArray | float) -> Plan:
        """So many tokens, for everybody or for each, where there is room for them; everybody votes."""
        num = batch.slots.size
        return cls(
            lengths=np.minimum(wanted, batch.rooms),
            predicted=np.full(num, wanted, np.float64),
            votes=np.ones(num, np.bool_),
            signals={name: np.full(num, value, np.float64) for name, value in signals.items()},
        )


@dataclass(slots=True)
class Outcome(_Counted):
    """What verification found, for the same sequences in the same order as the plan. Written by the engine."""

    slots: IntArray
    drafted: IntArray
    """[batch] tokens that were drafted and verified; 0 where nothing was. A device that had gone on before it was asked
    went by the plan before, and by nobody's lengths"""
    accepted: IntArray
    """[batch] drafted tokens that stood, without the bonus token"""
    klds: FloatArray
    """[sum(drafted)] KLD of every verified position, sequence after sequence; empty unless Need.KLD"""
    temperatures: FloatArray
    token_probs: FloatArray = field(default_factory=lambda: np.empty(0))
    """[sum(drafted)] what the draft gave each of its tokens, likewise; empty unless Need.TOKEN_PROB"""
    draft_signals: FloatArray = field(default_factory=lambda: np.empty((0, 3)))
    """[sum(drafted), 3] entropy, top probability and margin of the draft's distribution there, likewise; empty unless
    Need.DRAFT_SIGNALS"""
    draft_s: float = 0.0
    """seconds that drafting took, for the whole batch; 0: nobody measured, or what was measured is not typical"""
    verify_s: float = 0.0
    """seconds that the target's pass and the verdict took, likewise"""
    delay_s: float = 0.0
    """seconds by which the whole batch was later for it than without drafts, the host's work included, where somebody
    measured that; it is in neither of the two above as a whole"""
    step_s: float = 0.0
    """seconds from the end of the step before to that of this one, whatever they went to, of all `num_steps` together;
    0: nobody measured, or there was none before"""
    num_decoding: int = 0
    """as in the BatchView of the plan"""
    num_prompt_tokens: int = 0
    num_drafted: int = 0
    """drafted and verified by the whole batch, requests that fixed their own length included"""
    num_cut: int = 0
    """drafted beside those, and not verified: cut by a budget"""
    num_draft_passes: int = 0
    """passes of the draft: the longest length of the whole batch"""
    num_catch_up_tokens: int = 0
    """tokens that the draft read because it had missed them: neither the newest of each sequence, nor the one that a
    draft accepted whole leaves unread"""
    num_draft_prompt_tokens: int = 0
    """of prompts, that the draft read in the same pass as the newest tokens"""
    is_resumed: bool = False
    """the draft began from rest, and may have taken longer than one that follows on another; engines in which it makes
    no difference do not say so"""
    is_ruled: bool = False
    """a rule was there to end its drafts, for which a device may have to wait"""
    is_by_heart: bool = False
    """but it was not asked, for once: everybody drafted what it expects"""
    is_odd: bool = False
    """its verification went another, slower way than that of drafts of one length, which are favoured: it tells nothing
    of these, nor of the machine"""
    num_steps: int = 1
    """that it stands for, one after the other and all alike: a rest that the plan announced may be told as one"""
    prompt_steps: list[tuple[int, float]] = field(default_factory=list)
    """of these steps, those that read prompts and went another, slower way than the others for it: tokens of prompts,
    and seconds, 0 where nobody measured. They are in nothing else that is told"""
    num_emitted: IntArray | None = None
    """[batch] tokens that each got, where some ended before the last of these steps; None: all got one in each, beside
    what stood"""

    @property
    def has_drafts(self) -> bool:
        return bool(self.num_draft_passes or self.drafted.any())


class Stage(ABC):
    """Changes the lengths of a batch after the policy has spoken. Composes with any policy: `DSDE() | MeanCap()`."""

    needs: Need = Need.NOTHING

    @property
    def cost_models(self) -> list[CostModel]:
        """As of a policy."""
        return []

    @abstractmethod
    def apply(self, plan: Plan, batch: BatchView) -> None:
        """Lower `plan.lengths` in place; say in `plan.cap` what was done."""

    def observe(self, outcome: Outcome) -> None:  # noqa: B027 (most stages learn nothing)
        """Learn from a verified step."""

    def forget(self, slots: IntArray) -> None:  # noqa: B027
        """These sequences have ended."""


class Policy(ABC):
    """Chooses how many tokens every sequence drafts. Uses only the past, so any policy is lossless."""

    needs: Need = Need.NOTHING

    @property
    def cost_models(self) -> list[CostModel]:
        """What it has learnt of seconds, to be shown, saved and restored; empty if it does not look at them."""
        return []

    @property
    def cost_model(self) -> CostModel | None:
        """The best informed of them."""
        return max(self.cost_models, key=lambda model: model.num_measured, default=None)

    @abstractmethod
    def plan(self, batch: BatchView) -> Plan:
        """Lengths for the coming step."""

    def observe(self, outcome: Outcome) -> None:  # noqa: B027 (off and static learn nothing)
        """Learn from the step just verified."""

    def settle(self, coming: BatchView | None = None, is_pressed: bool = False) -> None:  # noqa: B027
        """A step is under way and nobody waits for the host: time for what need not be done between two steps. May be
        called never, or after every `plan`. With `coming` the next step will be one of that batch, about. With
        `is_pressed` there is hardly any time: the device has been waiting for the host."""

    def rules_on(self) -> bool:
        """Whether drafts will be ended by a rule in the next plan as well, as far as that has been thought of. Where a
        device has gone on by the last one, and they will not, the next plan is asked for a step later."""
        return True

    def forget(self, slots: IntArray) -> None:  # noqa: B027
        """These sequences have ended: drop their state, the slots will be given to others."""

    def __or__(self, stage: Stage) -> Staged:
        return Staged(self, [stage])


class Staged(Policy):
    """A policy followed by stages, itself a policy."""

    def __init__(self, policy: Policy, stages: list[Stage]) -> None:
        self.policy = policy
        self.stages = stages
        self.needs = policy.needs
        for stage in stages:
            self.needs |= stage.needs

    @property
    def cost_models(self) -> list[CostModel]:
        parts: list[Policy | Stage] = [self.policy, *self.stages]
        return [model for part in parts for model in part.cost_models]

    def plan(self, batch: BatchView) -> Plan:
        plan = self.policy.plan(batch)
        wanted = plan.lengths.copy()
        for stage in self.stages:
            stage.apply(plan, batch)
        plan.num_lowered = int((plan.lengths < wanted).sum())
        return plan

    def observe(self, outcome: Outcome) -> None:
        self.policy.observe(outcome)
        for stage in self.stages:
            stage.observe(outcome)

    def settle(self, coming: BatchView | None = None, is_pressed: bool = False) -> None:
        self.policy.settle(coming, is_pressed)

    def rules_on(self) -> bool:
        return self.policy.rules_on()

    def forget(self, slots: IntArray) -> None:
        self.policy.forget(slots)
        for stage in self.stages:
            stage.forget(slots)

    def __or__(self, stage: Stage) -> Staged:
        return Staged(self.policy, [*self.stages, stage])
