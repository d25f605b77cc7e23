"""`auto`: every further token of every sequence must earn more than it costs. See docs/auto.md.

Joins what others have apart: how likely this very token is to stand (`AcceptanceModel`, from the draft's own
distribution and from what stood of late), and what it costs on this machine under this load (`CostModel`). Both are
learnt while serving. Knows nothing of models, of tokens or of what is being written.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np

from dsde.core.stops import StopByWorth
from dsde.policies.acceptance import HIGHEST, LOWEST, AcceptanceModel
from dsde.policies.base import BatchView, BoolArray, FloatArray, IntArray, Need, Outcome, Plan, Policy
from dsde.policies.cost import CostModel
from dsde.policies.lifespan import Lifespan
from dsde.policies.limits import LONGEST, check_whole
from dsde.policies.menu import Menu
from dsde.policies.price import find_prices
from dsde.policies.probe import Probe
from dsde.policies.recheck import Recheck
from dsde.policies.sight import Sight, fill_chances
from dsde.policies.steadiness import Steadiness
from dsde.policies.verifications import size_of_batch

NUM_TRIED = 2
"""measurements of a size before it is believed"""
FIRST_REACH = 1
"""tokens that the first drafts may have; twice as many after every step that drafted"""
MOST_BLIND = 8
"""steps without drafts that are made only to have them measured, one after the other; some engines measure nothing"""
CLEAR_GAIN = 1.5
"""times as fast as without drafts, that needs no second measurement of these"""
URGENCY = 10.0
"""how much more of the time goes into probes that drafting would save, as it seems: a tenth of it"""
PATIENCE = 8
"""drafts that were planned although they do not seem to pay, before everybody stops: what one step took may be an
accident, and whoever begins again has to read what the draft missed"""
LEAST_GAIN = 0.03
"""of a step's tokens, that drafts must seem to bring before anybody begins, beyond what steps without drafts vary by:
what is compared is not known better than that, and requests that draft end at different times, the last of them by
themselves"""
HOPE = 0.5
"""of the tokens that do not stand, that might: if drafts would not pay even then, looking again is hardly worth it"""
LOST_HOPE = 0.7
"""share that is left of what is set aside for looking again, behind a look after which it hardly is"""
LEAST_HOPE = 0.5
"""the least that is left of it"""
CLEAR_LOSS = 0.15
"""of a step's tokens, that drafts cost beyond doubt: then everybody stops at once"""
SAME = 0.1
"""share by which a step may take longer, or shorter, than was thought and be as thought"""
NUM_IN_PASSING = 2
"""tokens that a draft reads beside the newest without taking longer"""
MOST_REPEATS = 2
"""of a plan, one after the other, where there is hardly any time to think of another"""
MOST_LATE = 2
"""steps that may be learnt from when the next one has been planned"""
GAIN_MEMORY = 128.0
"""steps after which what was realised of a planned rate counts about a third"""


@dataclass(slots=True)
class _Choice:
    """Lengths that pay best if nobody looks at tokens, and the rates that follow."""

    lengths: IntArray
    rate: float
    """tokens per second expected of them"""
    seconds: float
    """that such a step takes"""
    rate_off: float
    """tokens per second of a step without drafts"""
    least_gain: float
    """share of these that drafts must bring before anybody begins"""


@dataclass(slots=True)
class _Draft:
    """A plan for a batch as it was, to be used if the next one is like it."""

    batch: BatchView
    plan: Plan
    planned_rate: float
    """tokens per second while drafting; 0: nobody drafts, or only to look"""
    rule: StopByWorth | None
    """by which drafts end, or would if somebody looked at them; None: nobody drafts, or only to look"""
    is_probing: bool
    is_blind: bool
    """made without drafts to have that measured"""
    is_doubtful: bool
    """made with drafts that do not seem to pay"""
    foregone_s: float
    """that drafting is believed to save, and nobody does"""

    @property
    def is_ruled(self) -> bool:
        """Whether somebody looks at them."""
        return self.plan.stop is not None

    def fits(self, batch: BatchView) -> bool:
        mine = self.batch
        return (
            mine.num_decoding == batch.num_decoding
            and mine.num_prompt_tokens == batch.num_prompt_tokens
            and np.array_equal(mine.slots, batch.slots)
        )


class Auto(Policy):
    """Lengths for the whole batch that bring the most tokens per second, and a stop where a token turns out risky.

    A sequence's tokens are worth the chance that the draft stands up to them. A first choice of lengths takes every
    position at the sequence's average; while they are drafted, each is looked at, and what it is worth then decides
    whether it is verified and whether another one is drawn; unless a device waits longer for that than it is worth, and
    the first choice stands. Costs are counted in tokens: seconds times the rate at which this batch could emit instead.
    A draft pass that all share is made if those who would take part in it are together worth it. Length 0, for one or
    for all, is an answer like any other; while all are at 0 a hundredth of the time is spent on looking again.

    What a step taught is worked into the next plan but one: in `settle`, while the device is busy with the next.
    """

    needs = Need.DRAFT_SIGNALS

    def __init__(self, max: int = 20, cost: CostModel | None = None) -> None:
        check_whole("max", max, 1, LONGEST)
        self.max = max
        # One measurement may be an accident, and whoever it puts off would never make another.
        self.cost = cost or CostModel(num_tried=NUM_TRIED, is_flat_below=True)
        self.acceptance = AcceptanceModel()
        self._lifespan = Lifespan()
        self._gains = [1.0, 1.0]
        """realised over planned rate while drafting, lately: decided beforehand, and by a rule"""
        self._is_ruled = True
        """the way of the newest plan"""
        self._can_rule = True
        """whether whoever drafts obeys a rule"""
        self._sight = Sight()
        self._reach = min(FIRST_REACH, max)
        self._probe = Probe(self.cost, max, self._lifespan)
        self._recheck = Recheck()
        self._steadiness = Steadiness()
        self._hope = 1.0
        """share of what is usual that is set aside for looking again"""
        self._menu = Menu(max)
        self._current: _Draft | None = None
        self._next: _Draft | None = None
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
        self._num_blind = 0
        """plans made blindly since such a step was measured"""
        self._drafts = False
        self._num_doubtful = 0
        """of the newest drafts"""
        self._foregone_s = 0.0
        """that drafting would have saved since it was last believed to save nothing"""
        self._unlearnt: list[tuple[Outcome, _Draft]] = []
        self._gone: set[int] = set()
        """slots of sequences that have ended, to be forgotten when what was seen of them is learnt"""

    @property
    def cost_models(self) -> list[CostModel]:
        return [self.cost]

    def plan(self, batch: BatchView) -> Plan:
        if self._current is not None and self._current.is_probing and not self._num_observed:
            self._probe.drop()  # its step failed, or all who were in it are gone
        current = self._current
        # A device may be waiting; but what a rest missed must not be counted behind what is missed by now.
        num_late = sum(outcome.num_steps for outcome, _ in self._unlearnt) if self._num_rested > 1 else 0
        is_same = num_late > 0 and current is not None and current.fits(batch)
        if num_late > MOST_LATE or is_same or not self._gone.isdisjoint(batch.slots.tolist()):
            self._learn()
        has_missed = self.cost.see(batch)
        is_new = self._meet(batch)
        has_met = bool(is_new.any())
        if current is not None and not has_missed and current.fits(batch):
            if self._rests():
                current.plan.num_resting -= self._num_rested
                return self._again(current, batch)
            if self._num_put_off and not has_met and self._can_repeat():
                return self._again(current, batch)
        if (plan := self._rest_on(batch, is_new) or self._draft_on(batch, is_new)) is not None:
            return plan
        # A look was taken into account when the one behind it was planned, whatever it had to read.
        is_expected = self._next is not None and self._next.is_probing
        if self._next is not None and ((has_missed and not is_expected) or not self._next.fits(batch)):
            self._drop_next()
        draft = self._next or self._draft(batch)
        draft.batch = batch
        self._current, self._next = draft, None
        self._num_left = self._num_joined = 0
        self._count_anew()
        # Whoever only has to know what a step without drafts costs goes on behind it.
        self._drafts = draft.rule is not None or (draft.is_blind and self._drafts)
        if draft.is_blind:
            self._num_blind += 1
            self._recheck.begin(batch.num_sequences)
        draft.plan.lengths = np.minimum(draft.plan.lengths, batch.rooms)
        return draft.plan

    def _again(self, current: _Draft, batch: BatchView) -> Plan:
        """The current plan for another step."""
        current.batch = batch
        current.plan.lengths = np.minimum(current.plan.lengths, batch.rooms)
        self._count_anew()
        return current.plan

    def _count_anew(self) -> None:
        """Nothing has been seen of the plan that is handed over."""
        self._num_observed = self._num_settled = self._num_rested = 0
        self._is_settled = False

    def observe(self, outcome: Outcome) -> None:
        if not self._is_settled and not self._rests():
            self._learn()
        if self._current is not None:
            self._unlearnt.append((outcome, self._current))
        self._num_observed += 1
        self._num_rested += outcome.num_steps
        if self._num_observed > self._num_settled + 1:  # all rested: what was thought of before that is old
            self._drop_next()

    def settle(self, coming: BatchView | None = None, is_pressed: bool = False) -> None:
        self._drop_next()  # made for a step that had nobody to plan for
        self._is_settled, self._is_pressed = True, is_pressed
        is_pressed = is_pressed and coming is None and self._can_repeat()
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
            self._next = self._draft(coming)
        elif coming is None and self._current is not None and self._num_rested >= self._current.plan.num_resting:
            self._next = self._draft(self._current.batch)

    def _can_repeat(self) -> bool:
        """Whether the current plan is as good for another step: everybody drafts, and that seems to pay."""
        current = self._current
        return current is not None and current.rule is not None and not current.is_doubtful

    def _meet(self, batch: BatchView) -> BoolArray:
        """[batch] who is new. What drafting would have saved of others is no reason to read their prompts."""
        is_new = self._lifespan.see(batch.slots)
        if self._foregone_s and is_new.any():
            behind = self.cost.behind(batch.slots)
            self._foregone_s *= 1 - float(behind[is_new].sum()) / max(float(behind.sum()), 1.0)
        return is_new

    def _rests(self) -> bool:
        """Whether this is one of the steps that the current plan announced, and somebody asks all the same."""
        return self._current is not None and 0 < self._num_rested <= self._current.plan.num_resting

    def _would_rest_on(self, batch: BatchView) -> bool:
        """Whether nothing need be thought of for it, with a step of the rest under way."""
        current = self._current
        if current is None:
            return False
        num_left = self._num_left or current.plan.num_resting - self._num_rested - 1
        is_new = self._lifespan.is_new(batch.slots)
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
        plan = Plan.wanting(0, batch)
        plan.signals = {
            name: np.where(places >= 0, values[places], np.nan) for name, values in current.plan.signals.items()
        }
        plan.num_resting = num_left
        share = batch.num_sequences / current.batch.num_sequences
        self._current = replace(current, batch=batch, plan=plan, foregone_s=share * current.foregone_s)
        self._num_left = 0
        self._num_joined += int(np.count_nonzero(is_new))
        self._drop_next()
        self._count_anew()
        return plan

    def _draft_on(self, batch: BatchView, is_new: BoolArray) -> Plan | None:
        """The same drafts for those who are left of a batch when somebody ends, where there is hardly any time to think
        of others."""
        current = self._current
        if current is None or current.rule is None or not self._is_pressed or not self._can_repeat() or is_new.any():
            return None
        if batch.slots.size >= current.batch.slots.size:  # nobody has, and there is a plan for them, or time for one
            return None
        places = self._places(batch, current.batch, is_new)
        if places is None:
            return None
        plan, rule = current.plan, current.rule
        usual = None if rule.usual is None else rule.usual[places]
        rule = replace(rule, offsets=rule.offsets[places], outlooks=rule.outlooks[places], usual=usual)
        plan = replace(
            plan,
            lengths=np.minimum(plan.lengths[places], batch.rooms),
            predicted=plan.predicted[places],
            votes=plan.votes[places],
            signals={name: values[places] for name, values in plan.signals.items()},
            stop=rule if current.is_ruled else None,
        )
        rate = current.planned_rate * batch.num_sequences / current.batch.num_sequences
        self._current = replace(current, batch=batch, plan=plan, rule=rule, planned_rate=rate)
        self._drop_next()
        self._count_anew()
        return plan

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
            self._num_left = max(self._current.plan.num_resting - self._num_rested, 0)
            self._current.plan.num_resting = 0

    def _drop_next(self) -> None:
        if self._next is not None and self._next.is_probing:
            self._probe.drop()
        self._next = None

    def _learn(self) -> None:
        is_late = bool(self._unlearnt) and all(draft is not self._current for _, draft in self._unlearnt)
        for outcome, draft in _told_together(self._unlearnt):
            self._learn_from(outcome, draft)
        self._unlearnt.clear()
        if is_late and self._current is not None:
            self.cost.see(self._current.batch)  # what they missed is in what that one knew
        if self._gone:
            slots = np.array(sorted(self._gone))
            self._gone.clear()
            for part in (self.acceptance, self._lifespan, self.cost, self._probe):
                part.forget(slots)

    def _learn_from(self, outcome: Outcome, draft: _Draft) -> None:
        thought_s = self._plain_s(outcome)
        is_known = self.cost.num_verified(outcome.num_plain_tokens) > 0
        step = self.cost.observe(outcome)
        if not self.cost.is_below(draft.batch.num_sequences):
            self._num_blind = 0
        plain_s = self._plain_s(outcome)
        self.acceptance.observe(outcome)
        self._lifespan.observe(outcome)
        if draft.is_probing:
            self._probe.end(step, plain_s, outcome.is_resumed)
            self._hope = max(LOST_HOPE * self._hope, LEAST_HOPE)  # until the next plan, if there is any
        self._num_doubtful = self._num_doubtful + 1 if draft.is_doubtful else 0
        self._foregone_s = self._foregone_s + outcome.num_steps * draft.foregone_s if draft.foregone_s else 0.0
        kept = math.exp(-outcome.num_steps / GAIN_MEMORY)
        if not _has_drafts(outcome):
            # Before what is believed costs much it is looked at once more, and again.
            self._probe.save(outcome.num_steps * (self._hope * plain_s + URGENCY * draft.foregone_s))
            self._gains = [kept * gain + 1 - kept for gain in self._gains]  # or a bad time would never be over
            if outcome.verify_s > 0 and not outcome.num_prompt_tokens:
                if is_known:
                    self._steadiness.observe(outcome.verify_s / thought_s, outcome.num_steps)
                is_as_thought = abs(outcome.verify_s - thought_s) <= SAME * thought_s
                self._recheck.end(outcome.num_sequences, is_as_thought)
            return
        self._recheck.count(outcome.num_sequences)
        self._reach = min(2 * self._reach, self.max)
        if draft.rule is not None:
            self._can_rule = self._can_rule and draft.is_ruled == outcome.is_ruled
            if self._can_rule:
                self._weigh(outcome, draft, draft.rule)
        # Plans leave prompts out that are read anyway.
        prompts_s = plain_s - float(self.cost.verify_s(outcome.num_sequences))
        seconds = step.draft_s + max(step.verify_s - prompts_s, 0.0)
        if draft.planned_rate > 0 and seconds > 0 and step.is_typical:
            emitted = float(outcome.accepted.sum()) + outcome.num_sequences
            gain = emitted / (seconds * draft.planned_rate)
            before = self._gains[draft.is_ruled]
            self._gains[draft.is_ruled] = min(max(kept * before + (1 - kept) * gain, 0.5), 2.0)

    def _weigh(self, outcome: Outcome, draft: _Draft, rule: StopByWorth) -> None:
        """What a draft that a rule ended would have brought, and taken, had its lengths been chosen beforehand."""
        num, drafted = outcome.num_sequences, outcome.drafted
        is_due, signals = self._sight.count(num), outcome.draft_signals
        is_known = signals.shape[0] == int(drafted.sum()) and bool(np.isfinite(signals).all())
        if not (is_due and outcome.is_ruled and is_known):
            return
        owners = np.repeat(np.arange(drafted.size), drafted)
        found = rule.survivals(owners, np.ones(owners.size), signals)
        self.cost.turn_to(num)
        beforehand = self._choose(draft.batch, rule.outlooks, self.cost.start_of(False)).lengths
        # Those who did not draft for another reason would not have drafted then either.
        beforehand = np.where(draft.plan.lengths > 0, beforehand, 0)
        most = max(int(drafted.max()), int(beforehand.max()), 1)
        chances = fill_chances(drafted, found, rule.outlooks, most)
        survivals = np.multiply.accumulate(chances, axis=1)
        tokens, seconds = [], []
        # Of requests that chose for themselves there may be longer ones beside them.
        most_passes = min(outcome.num_draft_passes, int(drafted.max()) + 1)
        for lengths, num_passes in ((beforehand, int(beforehand.max())), (drafted, most_passes)):
            num_drafted, num_passes = int(lengths.sum()), max(num_passes, 1)
            tokens.append(num + float(survivals[np.arange(most) < lengths[:, None]].sum()))
            pass_s = float(self.cost.draft_s(max(num_drafted / num_passes, 1.0)))
            seconds.append(num_passes * pass_s + float(self.cost.verify_s(num + num_drafted)))
        self._sight.observe(num, (tokens[0], tokens[1]), (seconds[0], seconds[1]))

    @property
    def _gain(self) -> float:
        return self._gains[self._is_ruled]

    @property
    def _start_s(self) -> float:
        return self.cost.start_of(self._is_ruled)

    def _plain_s(self, outcome: Outcome) -> float:
        """What such a step takes without drafts, as far as is known."""
        self.cost.turn_to(outcome.num_sequences)
        return float(self.cost.verify_s(outcome.num_plain_tokens))

    def _draft(self, batch: BatchView) -> _Draft:
        """The plan for such a batch by all that is known."""
        self.cost.turn_to(batch.num_sequences)
        outlooks, doubts = self.acceptance.outlooks(batch.slots)
        starts_s = self.cost.start_of(False), self.cost.start_of(True)
        self._is_ruled = not self._can_rule or self._sight.is_worth_it(batch.num_sequences, starts_s)
        # The benefit of the doubt: whoever drafts too little is never seen to deserve more. Many are not all in doubt
        # the same way. While nobody drafts there are probes for that; and of what nobody looks at too much costs more.
        doubts /= np.sqrt(max(batch.slots.size, 1))
        hopes = np.minimum(outlooks + doubts, HIGHEST) if self._drafts and self._is_ruled else outlooks
        choice = self._choose(batch, hopes, self._start_s)
        is_worth = self._is_worth_reading(batch, choice)
        if not is_worth.all():
            # Without those who will have ended before it has paid for what their drafts must read first.
            choice = self._choose(batch, np.where(is_worth, hopes, LOWEST), self._start_s)
            choice.lengths = np.where(is_worth, choice.lengths, 0)
        is_blind = self._is_blind(batch, choice)
        pays, foregone_s = (False, 0.0) if is_blind else self._decide(batch, choice)
        is_doubtful = pays and not self._seems_to_pay(choice)
        if pays and self._can_rule and self._sight.is_try(batch.num_sequences):
            # By the way that was found better it pays, whatever the other one seems to bring.
            self._is_ruled = not self._is_ruled
            other = self._choose(batch, np.where(is_worth, outlooks, LOWEST), self._start_s)
            choice = other if other.lengths.any() else choice
            choice.lengths = np.where(is_worth, choice.lengths, 0)
        chosen = choice.lengths if pays else choice.lengths * 0
        num_emitted = batch.num_sequences + _num_accepted(outlooks, chosen)
        planned_rate = num_emitted / choice.seconds if pays else 0.0
        rate = max(planned_rate * self._gain, choice.rate_off)
        # A draft whose tokens all look sure may go well beyond what is usual. Not so the first ones, at all and in a
        # batch of this size: nobody knows what so many tokens cost.
        known = (2 * self.cost.most_verified - batch.num_sequences) // max(batch.num_sequences, 1)
        farthest = 2 * chosen + 2 if self._is_ruled else chosen
        lengths = np.where(chosen > 0, np.minimum(farthest, min(self._reach, max(known, FIRST_REACH))), 0)
        if pays or is_blind or self._is_hopeful(batch, outlooks):
            self._hope = 1.0
        can_look = not self._probe.is_under_way or self._probe.is_due(batch)
        is_probing = not pays and not is_blind and can_look and self._probe.begin(batch, NUM_TRIED, self._hope)
        if is_probing:
            lengths = self._probe.lengths
        else:
            self._probe.pass_over()
        prices = find_prices(self.cost, rate, outlooks, chosen, batch.rooms, batch.num_sequences)
        ones = np.ones(batch.slots.size)
        plan = Plan(
            lengths=lengths,
            predicted=chosen.astype(np.float64),
            votes=ones.astype(np.bool_),
            signals={
                "outlook": outlooks,
                "gain_of_last": outlooks**chosen,
                "gain_of_next": outlooks ** (chosen + 1),
                "cost_of_token": rate * (prices.token_s + prices.each_s) * ones,
                "cost_of_pass": rate * prices.pass_s * ones,
                "rate": rate * ones,
                "rate_off": choice.rate_off * ones,
            },
        )
        if not (pays or is_probing or is_blind or self._probe.is_under_way):
            plain_s = float(self.cost.verify_s(batch.num_sequences))
            plan.num_resting = self._probe.num_steps_left(self._hope * plain_s + URGENCY * foregone_s)
            if foregone_s:
                plan.num_resting = min(plan.num_resting, int(self._missing_s(batch) / foregone_s))
        rule = None
        if pays:
            rule = StopByWorth(
                weights=self.acceptance.weights[2:].copy(),
                offsets=self.acceptance.offsets(outlooks),
                outlooks=outlooks,
                keep_above=rate * prices.token_s,
                go_on_above=rate * (prices.token_s + prices.each_s),
                pass_above=rate * prices.pass_s,
                usual=chosen,
                dearer=rate * (prices.beyond_s - prices.token_s),
            )
            plan.stop = rule if self._is_ruled else None
        return _Draft(batch, plan, planned_rate, rule, is_probing, is_blind, is_doubtful, foregone_s)

    def _is_blind(self, batch: BatchView, choice: _Choice) -> bool:
        """Whether to have a step without drafts measured: whoever begins with drafts compares them with one that was
        never made, whoever goes on with one that may not be like that any more, and a wrong guess of that lasts."""
        if self._num_blind < MOST_BLIND and self.cost.is_guess(batch):
            return True
        is_clear = choice.rate * self._gain > CLEAR_GAIN * choice.rate_off
        return self._drafts and not is_clear and self._recheck.is_due(batch.num_sequences) and self.cost.can_rest(batch)

    def _decide(self, batch: BatchView, choice: _Choice) -> tuple[bool, float]:
        """Whether to draft; if not, seconds a step that drafting is believed to save all the same.

        Nobody begins again before these have summed up to what beginning costs: the draft has to read what it missed,
        and where drafts bring as much as they cost it would read that for nothing, time and again.
        """
        if not self._seems_to_pay(choice):
            is_clear = choice.rate * self._gain < (1 - CLEAR_LOSS) * choice.rate_off
            is_patient = self._drafts and self._num_doubtful < PATIENCE and not is_clear
            return is_patient and bool(choice.lengths.any()), 0.0
        if self._drafts or self._missing_s(batch) <= 0:
            return True, 0.0
        return False, batch.num_sequences * self._saved_s(choice)

    def _is_hopeful(self, batch: BatchView, outlooks: FloatArray) -> bool:
        """Whether drafts would pay if clearly more of them stood than is known of; or nobody knows what they take."""
        if self.cost.num_drafts < NUM_TRIED:
            return True
        choice = self._choose(batch, np.minimum(outlooks + HOPE * (1 - outlooks), HIGHEST), self._start_s)
        return self._seems_to_pay(choice)

    def _seems_to_pay(self, choice: _Choice) -> bool:
        least = choice.rate_off * (1.0 if self._drafts else 1 + choice.least_gain)
        return choice.rate * self._gain > least and bool(choice.lengths.any())

    def _saved_s(self, choice: _Choice) -> float:
        """Of every token that is emitted, by drafting."""
        return 1 / choice.rate_off - 1 / (choice.rate * self._gain)

    def _is_worth_reading(self, batch: BatchView, choice: _Choice) -> BoolArray:
        """[batch] whether drafts will save what it costs to have the draft read first; everybody where nothing pays."""
        behind = self.cost.behind(batch.slots)
        behind = np.where(behind > NUM_IN_PASSING, behind, 0)
        if not behind.any() or not self._seems_to_pay(choice):
            return np.ones(behind.size, np.bool_)
        num_behind = int(behind.sum())
        shares_s = behind * float(self.cost.catch_up_s(num_behind)) / num_behind
        worth: BoolArray = self._saved_s(choice) * self._lifespan.num_left(batch) >= shares_s
        return worth

    def _missing_s(self, batch: BatchView) -> float:
        """What beginning costs beyond what drafting would have saved so far."""
        # Of all, though few may be chosen now: once somebody drafts, the others join as soon as a token of theirs pays.
        return float(self.cost.catch_up_s(self.cost.num_behind(batch.slots))) - self._foregone_s

    def _choose(self, batch: BatchView, outlooks: FloatArray, start_s: float) -> _Choice:
        """Where a draft takes `start_s` once."""
        num_base = batch.num_sequences
        kinds = self._menu.kinds(outlooks)
        one_length = batch.favours_one_length or kinds.size == 1
        counts, drafted, gains = (self._menu.totals_of_one_length if one_length else self._menu.totals)(kinds)
        packed = num_base + drafted
        # Hundreds of choices, but never more sequences in a pass than there are.
        pass_s = np.concatenate(([0.0], self.cost.draft_s(np.arange(1.0, kinds.size + 1))))
        draft_s = pass_s[counts.astype(np.intp)]
        seconds = start_s + np.add.accumulate(draft_s, axis=1) + self.cost.verify_s(packed)
        rates = np.where(drafted > 0, (num_base + gains) / seconds, 0.0)
        level, last = divmod(int(rates.argmax()), self.max)
        rate_off = num_base / float(self.cost.verify_s(num_base))
        lengths = np.full(kinds.size, last + 1) if one_length else self._menu.lengths(kinds, level, last + 1)
        lengths = np.minimum(lengths, batch.rooms)
        least_gain = LEAST_GAIN + self._steadiness.spread
        return _Choice(lengths, float(rates[level, last]), float(seconds[level, last]), rate_off, least_gain)


def _num_accepted(outlooks: FloatArray, lengths: IntArray) -> float:
    """Expected of drafts of these lengths."""
    return float((outlooks * (1 - outlooks**lengths) / (1 - outlooks)).sum())


def _has_drafts(outcome: Outcome) -> bool:
    return bool(outcome.num_draft_passes or outcome.drafted.any())


def _told_together(told: list[tuple[Outcome, _Draft]]) -> Iterator[tuple[Outcome, _Draft]]:
    """Steps of a rest as one: nothing depends on them before it is over, and where a step is short a device would wait
    for what is learnt of each."""
    for _, group in groupby(told, key=lambda each: id(each[1])):
        outcomes, drafts = zip(*group, strict=True)
        if len(outcomes) == 1 or any(map(_has_drafts, outcomes)):
            yield from zip(outcomes, drafts, strict=True)
            continue
        timed = [outcome for outcome in outcomes if outcome.verify_s > 0]
        untimed = [outcome for outcome in outcomes if not outcome.verify_s > 0]
        for alike in filter(None, (untimed, timed)):
            verify_s = statistics.median_low(outcome.verify_s for outcome in alike)
            num_steps = sum(outcome.num_steps for outcome in alike)
            yield replace(alike[-1], verify_s=verify_s, num_steps=num_steps), drafts[-1]
