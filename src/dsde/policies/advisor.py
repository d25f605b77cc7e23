"""What pays for a batch, by all that is known: drafts of which lengths and by which rule, none, or a look.

Joins what others have apart: how likely this very token is to stand (`AcceptanceModel`, from the draft's own
distribution and from what stood of late), and what it costs on this machine under this load (`CostModel`). Both are
learnt while serving. Knows nothing of when it is asked, and whether a device waits for it: see `Auto`.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import numpy as np

from dsde.core.stops import StopByWorth
from dsde.policies.acceptance import HIGHEST, LOWEST, AcceptanceModel
from dsde.policies.advice import Advice
from dsde.policies.base import BatchView, BoolArray, FloatArray, IntArray, Outcome, Plan
from dsde.policies.choice import Choice, choose
from dsde.policies.cost import CostModel
from dsde.policies.detour import Detour
from dsde.policies.lifespan import Lifespan
from dsde.policies.menu import Menu
from dsde.policies.occasions import Occasions
from dsde.policies.price import Prices, find_prices
from dsde.policies.probe import Probe
from dsde.policies.recheck import Recheck
from dsde.policies.sight import Sight, fill_chances
from dsde.policies.steadiness import Steadiness
from dsde.policies.stretch import Stretch
from dsde.policies.surplus import Surplus
from dsde.policies.verifications import size_of_batch
from dsde.policies.waves import NUM_IN_PASSING, Waves

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
PAUSE_SHARE = 0.05
"""of the time that requests will take yet, that it may cost to have a step without drafts measured"""
CLEARLY = 2.0
"""times what beginning costs, that drafts are expected to save until requests end: then it is begun at once"""
CLEAR_LOSS = 0.15
"""of a step's tokens, that drafts cost beyond doubt: then everybody stops at once"""
SAME = 0.1
"""share by which a step may take longer, or shorter, than was thought and be as thought"""
MOST_EARLY = 8
"""steps that read prompts, at first for a size of batch, in which nobody drafts"""
LEAST_REST = 32
"""steps without drafts, told together, of which the first may be one behind drafts"""
LOOKED_AT_EVERY = 4
"""drafts of those that no rule may end: of so many it is learnt what signals tell, where looking takes time"""
LONGEST_KNOWN = 32
"""verifications of other sizes after which nobody knows any more what one takes: machines change"""
MOST_ASIDE = 0.2
"""share of the rate that lengths may seem to cost which are made only to see what they take now"""
GAIN_MEMORY = 128.0
"""steps after which what was realised of a planned rate counts about a third"""


class Advisor:
    """A sequence's tokens are worth the chance that the draft stands up to them. A first choice of lengths takes every
    position at the sequence's average; while they are drafted, each is looked at, and what it is worth then decides
    whether it is verified and whether another one is drawn; unless a device waits longer for that than it is worth, and
    the first choice stands. Costs are counted in tokens: seconds times the rate at which this batch could emit instead.
    A draft pass that all share is made if those who would take part in it are together worth it. Length 0, for one or
    for all, is an answer like any other; while all are at 0 a hundredth of the time is spent on looking again.
    """

    def __init__(self, max_length: int, cost: CostModel) -> None:
        self.max_length = max_length
        self.cost = cost
        self.acceptance = AcceptanceModel()
        self.lifespan = Lifespan()
        self.gains = [1.0, 1.0]
        """realised over planned rate while drafting, lately: decided beforehand, and by a rule"""
        self.sight = Sight()
        self.probe = Probe(cost, max_length, self.lifespan)
        self.recheck = Recheck()
        self.steadiness = Steadiness()
        self.stretch = Stretch()
        self.detour = Detour()
        self.surplus = Surplus()
        self.waves = Waves(cost)
        self.hope = 1.0
        """share of what is usual that is set aside for looking again"""
        self.is_drafting = False
        """everybody, from step to step, and from one request to the next"""
        self.num_doubtful = 0
        """of the newest drafts"""
        self._menu = Menu(max_length)
        self._is_ruled = True
        """the way of the newest advice"""
        self._can_rule = True
        """whether whoever drafts obeys a rule"""
        self._reach = min(FIRST_REACH, max_length)
        self._num_blind = 0
        """plans made blindly since such a step was measured"""
        self._nums_early: Counter[int] = Counter()
        """by size of batch: steps beside prompts before one was"""
        self._last_look: Advice | None = None
        self._wave: Advice | None = None
        """of which it is not known yet what came of it"""
        self._num_unruled = 0
        """plans with drafts that no rule may end"""
        self._had_drafts = False
        """whether the step did that was learnt from last"""
        self._foregone_s = 0.0
        """that drafting would have saved since it was last believed to save nothing"""

    def meet(self, batch: BatchView) -> BoolArray:
        """[batch] who is new. What drafting would have saved of others is no reason to read their prompts."""
        self._foregone_s = self._foregone_of(batch)
        return self.lifespan.see(batch.slots, batch.num_left)

    def _foregone_of(self, batch: BatchView) -> float:
        """The share of those who are not new."""
        if not self._foregone_s or not (is_new := self.lifespan.is_new(batch.slots)).any():
            return self._foregone_s
        behind = self.cost.behind(batch.slots)
        return self._foregone_s * (1 - float(behind[is_new].sum()) / max(float(behind.sum()), 1.0))

    def advise(self, batch: BatchView) -> Advice:
        """On a step of such a batch, which `cost` has seen. It may begin a look: what is said is taken or dropped."""
        num = batch.num_sequences
        self.cost.turn_to(num)
        outlooks, doubts = self.acceptance.outlooks(batch.slots)
        starts_s = self.cost.beside_of(False), self.cost.beside_of(True)
        self._is_ruled = not self._can_rule or self.sight.is_worth_it(num, starts_s)
        choice, is_worth = self._choose_readers(batch, outlooks, self._hopes(outlooks, doubts))
        is_blind, is_early = self._is_blind(batch, choice), self._is_early(batch)
        pays, foregone_s = (False, 0.0) if is_blind or is_early else self._decide(batch, choice)
        is_doubtful = pays and not self._seems_to_pay(choice)
        wave, is_partial, is_waiting, occasion = batch.slots[:0], False, False, None
        if pays:
            choice = self._try_others(batch, choice, outlooks, is_worth)
            wanted = choice.lengths
            if not batch.favours_one_length:  # or all begin together
                choice.lengths, wave = self.waves.limit(batch, wanted, is_doubtful)
                is_partial = choice.lengths is not wanted
            pays = bool(choice.lengths.any())
            is_waiting = is_partial and not pays and self.waves.is_open and not is_doubtful
            is_doubtful = is_doubtful and pays
            if self._can_rule and pays and not is_doubtful and not is_partial:
                occasion = self._take_occasion(batch, choice, outlooks)
        chosen = choice.lengths if pays else choice.lengths * 0
        is_whole = pays and not is_partial and occasion is None
        planned_rate = (num + _num_accepted(outlooks, chosen)) / choice.seconds if is_whole else 0.0
        rate = max(self._expected_rate(num, planned_rate), choice.rate_off)
        if pays or is_blind or self._is_hopeful(batch, outlooks):
            self.hope = 1.0
        is_pause = is_blind or is_early or is_waiting
        can_look = not (pays or is_pause) and (not self.probe.is_under_way or self.probe.is_due(batch))
        is_probing = can_look and self.probe.begin(batch, NUM_TRIED, self.hope)
        if not is_probing:
            self.probe.pass_over()
        prices = find_prices(self.cost, rate, outlooks, chosen, batch.rooms, num)
        ones = np.ones(batch.slots.size)
        plan = Plan(
            lengths=self.probe.lengths if is_probing else self._limits(num, chosen),
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
        if not (pays or is_probing or is_pause or self.probe.is_under_way):
            plan.num_resting = self._num_resting(batch, foregone_s)
        rule = self._rule(outlooks, chosen, prices, rate) if pays else None
        plan.stop = rule if self._is_ruled else None
        if pays and not self._is_ruled:
            self._num_unruled += 1
            plan.wants_signals = self._num_unruled % LOOKED_AT_EVERY == 0
        return Advice(
            batch,
            plan,
            planned_rate,
            rule,
            is_probing=is_probing,
            is_blind=is_blind,
            is_roomless=not batch.rooms.any(),
            is_doubtful=is_doubtful,
            foregone_s=foregone_s,
            is_partial=is_partial,
            wave=wave,
            is_waiting=is_waiting,
            occasion=occasion,
            is_early=is_early,
        )

    def _hopes(self, outlooks: FloatArray, doubts: FloatArray) -> FloatArray:
        """[batch] the benefit of the doubt: whoever drafts too little is never seen to deserve more. While nobody
        drafts there are probes for that; and of what nobody looks at too much costs more."""
        if not (self.is_drafting and self._is_ruled and self._can_rule):
            return outlooks
        # Many are not all in doubt the same way.
        hopes: FloatArray = np.minimum(outlooks + doubts / np.sqrt(max(doubts.size, 1)), HIGHEST)
        return hopes

    def _choose_readers(self, batch: BatchView, outlooks: FloatArray, hopes: FloatArray) -> tuple[Choice, BoolArray]:
        """Without those who will have ended before it has paid for what their drafts must read first: [batch] who is
        left, too."""
        choice = self._choose(batch, hopes, self._start_s)
        is_worth = self._is_worth_reading(batch, choice, outlooks)
        if not is_worth.all():
            choice = self._choose(batch, np.where(is_worth, hopes, LOWEST), self._start_s)
            choice.lengths = np.where(is_worth, choice.lengths, 0)
        return choice, is_worth

    def _choose_for_next(self, batch: BatchView, outlooks: FloatArray) -> Choice:
        """For those who will decode in the next step: whoever joins is taken to be like those who are there."""
        mine, num = batch.slots.size + batch.num_joining, batch.num_sequences + batch.num_joining
        slots, rooms = np.resize(batch.slots, mine), np.resize(batch.rooms, mine)
        next_batch = replace(batch, slots=slots, rooms=rooms, num_decoding=num)
        self.cost.turn_to(num)
        choice = self._choose(next_batch, np.resize(outlooks, mine), self._start_s)
        self.cost.turn_to(batch.num_sequences)
        return choice

    def _try_others(self, batch: BatchView, choice: Choice, outlooks: FloatArray, is_worth: BoolArray) -> Choice:
        """Of drafts that are made anyway: the other way, or longer ones, where nothing would be known of them."""
        if self._can_rule and self.sight.is_try(batch.num_sequences):
            # By the way that was found better it pays, whatever the other one seems to bring.
            self._is_ruled = not self._is_ruled
            other = self._choose(batch, np.where(is_worth, outlooks, LOWEST), self._start_s)
            choice = other if other.lengths.any() else choice
            choice.lengths = np.where(is_worth, choice.lengths, 0)
        if not self._can_rule and self.cost.needs_another_length:
            # Nobody ends a draft early, so that there would never be one.
            two = np.minimum(min(2, self.max_length), batch.rooms)
            choice.lengths = np.where(choice.lengths == 1, two, choice.lengths)
        return choice

    def _expected_rate(self, num_sequences: int, planned_rate: float) -> float:
        """Tokens per second, by what was realised of such plans, and with what steps take beyond what was told."""
        rate = planned_rate * self._gain
        return rate / (1 + rate * self.surplus.token_s(num_sequences)[True])

    def _limits(self, num_sequences: int, chosen: IntArray) -> IntArray:
        """[batch] tokens that a draft may have. One whose tokens all look sure may go well beyond what is usual. Not so
        the first ones, at all and in a batch of this size: nobody knows what so many tokens cost."""
        known = (2 * self.cost.most_verified - num_sequences) // max(num_sequences, 1)
        farthest = 2 * chosen + 2 if self._is_ruled else chosen
        return np.where(chosen > 0, np.minimum(farthest, min(self._reach, max(known, FIRST_REACH))), 0)

    def _num_resting(self, batch: BatchView, foregone_s: float) -> int:
        """Steps before it is time for another look, or to begin."""
        plain_s = float(self.cost.verify_s(batch.num_sequences))
        num = self.probe.num_steps_left(self.hope * plain_s + URGENCY * foregone_s)
        return min(num, int(self._missing_s(batch) / foregone_s)) if foregone_s else num

    def _rule(self, outlooks: FloatArray, chosen: IntArray, prices: Prices, rate: float) -> StopByWorth:
        return StopByWorth(
            weights=self.acceptance.weights[2:].copy(),
            offsets=self.acceptance.offsets(outlooks),
            outlooks=outlooks,
            keep_above=rate * prices.token_s,
            go_on_above=rate * (prices.token_s + prices.each_s),
            pass_above=rate * prices.pass_s,
            usual=chosen,
            dearer=rate * (prices.beyond_s - prices.token_s),
        )

    def take(self, advice: Advice) -> None:
        """It will be followed. What is made of it for others, when somebody ends or joins, need not be taken again."""
        # Whoever only has to know what a step without drafts costs goes on behind it, and so do those who come after
        # requests that had no room left for a draft.
        is_pause = advice.is_blind or advice.is_roomless or advice.is_early or advice.is_waiting
        self.is_drafting = advice.rule is not None or (is_pause and self.is_drafting)
        self._nums_early[size_of_batch(advice.batch.num_sequences)] += advice.is_early
        if advice.is_blind:
            self._num_blind += 1
            self.recheck.begin(advice.batch.num_sequences)
        if advice.occasion is not None:
            advice.occasion.take(advice.batch.num_sequences)
        if not self.is_drafting:
            self._wave = None
            self.waves.reset()
        elif advice.wave.size:
            self._wave = advice
            self.waves.begin()

    def drop(self, advice: Advice) -> None:
        """It is not followed, or nothing will come of it."""
        if advice.is_probing:
            self.probe.drop()
        if advice is self._wave:
            self._wave = None
            self.waves.drop()

    def learn(self, outcome: Outcome, advice: Advice) -> None:
        """What became of it."""
        thought_s = self._plain_s(outcome)
        is_known = self.cost.num_verified(outcome.num_plain_tokens) > 0
        if advice.occasion is not None:
            self.cost.renew_verified(outcome)
        step = self.cost.observe(outcome)
        self._count_surplus(outcome, advice)
        if advice is self._wave:
            self._wave = None
            self._end_wave(outcome, advice)
        if not self.cost.is_below(advice.batch.num_sequences):
            self._num_blind = 0
        plain_s = self._plain_s(outcome)
        self.acceptance.observe(outcome)
        self.lifespan.observe(outcome)
        if advice.is_probing:
            self.probe.end(step, plain_s, outcome.is_resumed, outcome.delay_s)
            if advice is not self._last_look:  # one may have several drafts
                self.hope = max(LOST_HOPE * self.hope, LEAST_HOPE)  # until the next plan, if there is any
            self._last_look = advice
        if not advice.is_roomless:
            self.num_doubtful = self.num_doubtful + 1 if advice.is_doubtful else 0
        self._foregone_s = self._foregone_s + outcome.num_steps * advice.foregone_s if advice.foregone_s else 0.0
        kept = math.exp(-outcome.num_steps / GAIN_MEMORY)
        if not outcome.has_drafts:
            # Before what is believed costs much it is looked at once more, and again.
            self.probe.save(outcome.num_steps * (self.hope * plain_s + URGENCY * advice.foregone_s))
            self.gains = [kept * gain + 1 - kept for gain in self.gains]  # or a bad time would never be over
            if outcome.verify_s > 0 and not outcome.num_prompt_tokens:
                if is_known:
                    self.steadiness.observe(outcome.verify_s / thought_s, outcome.num_steps)
                is_as_thought = abs(outcome.verify_s - thought_s) <= SAME * thought_s
                self.recheck.end(outcome.num_sequences, is_as_thought)
            return
        self.recheck.count(outcome.num_sequences)
        if advice.occasion is None:
            self.stretch.count(outcome.num_sequences)
            self.detour.count(outcome.num_sequences)
        self._reach = min(2 * self._reach, self.max_length)
        if advice.rule is not None and not outcome.is_by_heart:
            self._can_rule = self._can_rule and advice.is_ruled == outcome.is_ruled
            if self._can_rule:
                self._weigh(outcome, advice, advice.rule)
        # Plans leave prompts out that are read anyway.
        prompts_s = plain_s - float(self.cost.verify_s(outcome.num_sequences))
        seconds = step.draft_s + max(step.verify_s - prompts_s, 0.0)
        if advice.planned_rate > 0 and seconds > 0 and step.is_typical:
            emitted = float(outcome.accepted.sum()) + outcome.num_sequences
            gain = emitted / (seconds * advice.planned_rate)
            before = self.gains[advice.is_ruled]
            self.gains[advice.is_ruled] = min(max(kept * before + (1 - kept) * gain, 0.5), 2.0)

    def forget(self, slots: IntArray) -> None:
        """These sequences have ended."""
        for part in (self.acceptance, self.lifespan, self.cost, self.probe):
            part.forget(slots)

    def _count_surplus(self, outcome: Outcome, advice: Advice) -> None:
        """What the step took beyond what was told of it; where that was not typical, beyond what such a step takes."""
        has_drafts, had_drafts = outcome.has_drafts or advice.rule is not None, self._had_drafts
        self._had_drafts = has_drafts
        # Whoever ends a rest, or begins one, waits for the host, and so does a step that is made only to be measured.
        # That is the price of a change, not of what follows: a step without drafts by itself takes a fifth longer than
        # one of a rest (H200, 8B), and whoever took that for what all of them take would never stop drafting.
        is_change = advice.is_probing or outcome.is_resumed if has_drafts else had_drafts or advice.is_blind
        if not outcome.step_s or (is_change and outcome.num_steps < LEAST_REST):
            return
        usual_s = outcome.draft_s + outcome.verify_s if outcome.verify_s > 0 else self.cost.usual_s(outcome)
        num_emitted = outcome.num_steps * outcome.num_sequences + int(outcome.accepted.sum())
        self.surplus.observe(outcome.num_sequences, has_drafts, outcome.step_s, usual_s, num_emitted, outcome.num_steps)

    def _weigh(self, outcome: Outcome, advice: Advice, rule: StopByWorth) -> None:
        """What a draft that a rule ended would have brought, and taken, had its lengths been chosen beforehand."""
        num, drafted = outcome.num_sequences, outcome.drafted
        is_due, signals = self.sight.count(num, outcome.is_ruled), outcome.draft_signals
        is_known = signals.shape[0] == int(drafted.sum()) and bool(np.isfinite(signals).all())
        if not (is_due and outcome.is_ruled and is_known):
            return
        owners = np.repeat(np.arange(drafted.size), drafted)
        found = rule.survivals(owners, np.ones(owners.size), signals)
        self.cost.turn_to(num)
        beforehand = self._choose(advice.batch, rule.outlooks, self.cost.start_of(False)).lengths
        # Those who did not draft for another reason would not have drafted then either.
        beforehand = np.where(advice.lengths > 0, beforehand, 0)
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
        self.sight.observe(num, (tokens[0], tokens[1]), (seconds[0], seconds[1]))

    @property
    def _gain(self) -> float:
        return self.gains[self._is_ruled]

    @property
    def _start_s(self) -> float:
        return self.cost.start_of(self._is_ruled)

    def _plain_s(self, outcome: Outcome) -> float:
        """What such a step takes without drafts, as far as is known."""
        self.cost.turn_to(outcome.num_sequences)
        is_odd = outcome.is_odd and outcome.num_prompt_tokens > 0
        return self.cost.plain_s(outcome.num_sequences, outcome.num_plain_tokens, is_odd)

    def _is_blind(self, batch: BatchView, choice: Choice) -> bool:
        """Whether to have a step without drafts measured: whoever begins with drafts compares them with one that was
        never made, whoever goes on with one that may not be like that any more, and a wrong guess of that lasts."""
        if self.is_drafting and not self._can_pause(batch):
            return False
        if self._num_blind < MOST_BLIND and self.cost.is_guess(batch):
            return True
        is_clear = choice.rate * self._gain > CLEAR_GAIN * choice.rate_off
        return (
            self.is_drafting and not is_clear and self.recheck.is_due(batch.num_sequences) and self.cost.can_rest(batch)
        )

    def _end_wave(self, outcome: Outcome, advice: Advice) -> None:
        """By those of it whom the draft has read for: there may have been too little room for all of them, and some may
        have ended. What a rule cut off was hoped for, too, be it all of somebody's."""
        rule, batch = advice.rule, advice.batch
        _, mine, theirs = np.intersect1d(batch.slots, outcome.slots, return_indices=True)
        is_there = np.isin(batch.slots[mine], advice.wave)
        mine, theirs = mine[is_there], theirs[is_there]
        num_to_read = 0 if batch.num_missed is None else int(batch.num_missed[mine].sum())
        num_read = outcome.num_catch_up_tokens + outcome.num_draft_prompt_tokens
        if rule is None or rule.usual is None or not mine.size:
            self.waves.drop()
            return
        if not (outcome.is_ruled and 0 < num_to_read <= num_read + NUM_IN_PASSING * mine.size):
            has_drafted = outcome.drafted[theirs] > 0
            mine, theirs = mine[has_drafted], theirs[has_drafted]
        if not mine.size:
            self.waves.widen()
            return
        hoped = np.minimum(rule.usual[mine], advice.lengths[mine])
        # More than was hoped for of one is no sign that the others are as good.
        num_accepted = float(np.minimum(outcome.accepted[theirs], hoped).sum())
        self.waves.end(num_accepted, _num_accepted(rule.outlooks[mine], hoped))

    def _is_early(self, batch: BatchView) -> bool:
        """Whether nobody knows yet what a step of so many takes without drafts, and in this one it cannot be measured,
        since prompts are read in it, beside which drafts look cheap. But not for ever: it may always be so."""
        num = batch.num_sequences
        is_known = not batch.num_prompt_tokens or not self.cost.is_below(num)
        return not is_known and self._nums_early[size_of_batch(num)] < MOST_EARLY

    def _can_pause(self, batch: BatchView) -> bool:
        """Whether beginning again behind a step without drafts costs little of the time that requests will take."""
        if not self.cost.resume_s:
            return True
        step_s = float(self.cost.verify_s(batch.num_sequences)) / batch.num_sequences
        return self.cost.resume_s <= PAUSE_SHARE * step_s * float(self.lifespan.num_coming(batch).sum())

    def _decide(self, batch: BatchView, choice: Choice) -> tuple[bool, float]:
        """Whether to draft; if not, seconds a step that drafting is believed to save all the same.

        Nobody begins again before these have summed up to what beginning costs, unless drafts are expected to save
        clearly more than that: the draft has to read what it missed, and where drafts bring as much as they cost it
        would read that for nothing, time and again.
        """
        if not self._seems_to_pay(choice):
            is_clear = choice.rate * self._gain < (1 - CLEAR_LOSS) * choice.rate_off
            is_patient = self.is_drafting and self.num_doubtful < PATIENCE and not is_clear
            return is_patient and bool(choice.lengths.any()), 0.0
        if self.is_drafting or self._missing_s(batch) <= 0:
            return True, 0.0
        saved_s = self._saved_s(choice)
        if batch.num_left is not None:  # or nobody knows how long they last
            expected_s = saved_s * float(self.lifespan.num_coming(batch).sum())
            if expected_s >= CLEARLY * self.cost.begin_s(batch.slots):
                return True, 0.0
        return False, batch.num_sequences * saved_s

    def _is_hopeful(self, batch: BatchView, outlooks: FloatArray) -> bool:
        """Whether drafts would pay if clearly more of them stood than is known of; or nobody knows what they take."""
        if self.cost.num_drafts < NUM_TRIED:
            return True
        choice = self._choose(batch, np.minimum(outlooks + HOPE * (1 - outlooks), HIGHEST), self._start_s)
        return self._seems_to_pay(choice)

    def _seems_to_pay(self, choice: Choice) -> bool:
        # Where some do not draft, those who do end first and leave the others in a smaller batch.
        is_for_all = self.is_drafting and not choice.leaves_out
        least = choice.rate_off * (1.0 if is_for_all else 1 + self._doubt)
        return choice.rate * self._gain > least and bool(choice.lengths.any())

    @property
    def _doubt(self) -> float:
        """Share by which drafts may bring less than they seem to."""
        return LEAST_GAIN + self.steadiness.spread

    def _saved_s(self, choice: Choice, doubt: float = 0.0) -> float:
        """Of every token that is emitted, by drafting, if that brings less than it seems to by this share."""
        return 1 / choice.rate_off - (1 + doubt) / (choice.rate * self._gain)

    def _is_worth_reading(self, batch: BatchView, choice: Choice, outlooks: FloatArray) -> BoolArray:
        """[batch] whether drafts will save what it costs to have the draft read first; everybody where `choice` does
        not pay, since nobody will draft then."""
        behind = self.cost.behind(batch.slots)
        behind = np.where(behind > NUM_IN_PASSING, behind, 0)
        if not behind.any() or not self._seems_to_pay(choice):
            return np.ones(behind.size, np.bool_)
        # No benefit of the doubt here: nobody reads to find out.
        choice = self._choose_for_next(batch, outlooks)
        if not choice.lengths.any():
            return behind == 0 if not batch.favours_one_length else np.zeros(behind.size, np.bool_)
        num_behind = int(behind.sum())
        shares_s = behind * float(self.cost.catch_up_s(num_behind)) / num_behind
        if batch.favours_one_length:  # whoever did not draft would be dearer than what is to be read
            saved_s = self._saved_s(choice) * self.lifespan.num_coming(batch)
            resume_s = 0.0 if self.is_drafting else self.cost.resume_s
            return np.full(behind.size, saved_s.sum() >= shares_s.sum() + resume_s)
        saved_s = self._saved_s(choice, self._doubt) * self.lifespan.num_left(batch)
        worth: BoolArray = (behind == 0) | (saved_s >= shares_s)
        return worth

    def _missing_s(self, batch: BatchView) -> float:
        """What beginning costs beyond what drafting would have saved so far."""
        # Of all, though few may be chosen now: once somebody drafts, the others join as soon as a token of theirs pays.
        return self.cost.begin_s(batch.slots) - self._foregone_of(batch)

    def _take_occasion(self, batch: BatchView, choice: Choice, outlooks: FloatArray) -> Occasions | None:
        """Other lengths instead, if it is time for some: what that is. If there are none now, it is passed over."""
        num = batch.num_sequences
        for occasion in (self.stretch, self.detour):
            if not occasion.is_due(num):
                continue
            is_stretch = occasion is self.stretch
            lengths = self._stretched(batch, choice) if is_stretch else self._aside(batch, choice, outlooks)
            if lengths is not None:
                choice.lengths, self._is_ruled = lengths, False
                return occasion
            occasion.pass_over(num)
        return None

    def _stretched(self, batch: BatchView, choice: Choice) -> IntArray | None:
        """[batch] lengths beyond all that were verified so far, if none beyond those chosen were."""
        num, longest = batch.num_sequences, int(choice.lengths.max())
        if self.cost.most_verified // num - 1 > longest:
            return None
        lengths = np.where(choice.lengths > 0, np.minimum(2 * choice.lengths + 1, batch.rooms), 0)
        lengths = np.minimum(lengths, self.max_length)
        return lengths if int(lengths.max()) > longest else None

    def _aside(self, batch: BatchView, choice: Choice, outlooks: FloatArray) -> IntArray | None:
        """[batch] lengths a token shorter or longer, if as many have not been verified for a while, and seem to bring
        nearly as much."""
        num = batch.num_sequences
        step = self.detour.step(num) if int(choice.lengths.max()) > 1 else 1
        lengths = np.where(choice.lengths > 0, np.maximum(choice.lengths + step, 1), 0)
        lengths = np.minimum(lengths, np.minimum(batch.rooms, self.max_length))
        num_tokens = num + int(lengths.sum())
        is_known = self.cost.num_verified(num_tokens) >= NUM_TRIED
        is_old = self.detour.has_begun(num) or self.cost.age(num_tokens) >= LONGEST_KNOWN
        if (lengths == choice.lengths).all() or not (is_known and is_old):
            return None
        is_near = self._rate(num, outlooks, lengths) > (1 - MOST_ASIDE) * self._rate(num, outlooks, choice.lengths)
        return lengths if is_near else None

    def _rate(self, num: int, outlooks: FloatArray, lengths: IntArray) -> float:
        """Tokens per second of drafts of these lengths, whatever steps take beyond them."""
        num_drafted = int(lengths.sum())
        drafting_s = self.cost.drafting_s(num_drafted, int(lengths.max()))
        seconds = drafting_s + float(self.cost.verify_s(num + num_drafted))
        return (num + _num_accepted(outlooks, lengths)) / seconds

    def _choose(self, batch: BatchView, outlooks: FloatArray, start_s: float) -> Choice:
        return choose(self._menu, self.cost, batch, outlooks, start_s, self.surplus.token_s(batch.num_sequences))


def _num_accepted(outlooks: FloatArray, lengths: IntArray) -> float:
    """Expected of drafts of these lengths."""
    return float((outlooks * (1 - outlooks**lengths) / (1 - outlooks)).sum())
