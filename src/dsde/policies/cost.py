"""What a step costs on this machine: seconds of a draft pass and of a verification, learnt while serving.

Knows sizes and seconds; knows no model, no device, no context length.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from dsde.core.errors import InvalidInput
from dsde.policies.base import BatchView, BoolArray, FloatArray, IntArray, Outcome
from dsde.policies.curve import KNEE, LEAST_CHANGE, LONGEST_PAUSE, NUM_TRUSTED, Curve, bucket_of
from dsde.policies.drift import Drift
from dsde.policies.prompt_steps import PromptSteps
from dsde.policies.slots import SlotTable
from dsde.policies.start import Start
from dsde.policies.tempo import NUM_ALIKE, Tempo
from dsde.policies.verifications import Verifications, size_of_batch

VERIFY_S = 0.01
DRAFT_SHARE = 0.1
"""of a verification, that a draft pass is taken to cost until one has been measured"""
LARGEST_EXCESS = 10.0
"""a part of a step that took longer than this many times the model's estimate is counted as that many"""
MOST_UNCLEAN = 32
"""drafting steps in which somebody was behind, one after the other, until such steps count as normal"""
LONGEST_IDLE = 16
"""steps without drafts after which a new measurement of one replaces the old ones: it was decided by these"""
NUM_KEPT = 4
"""measurements of a step without drafts that count beside one that was made after a while: a single one may be off"""
NUM_KEPT_LONG = 2
"""the same if they are of long ago"""
NUM_KEPT_ASIDE = 2
"""the same beside two that were made for that: if these were shorter, they are believed"""
NUM_SETTLED = 16
"""measurements of a size, from which on it tells how the machine changes little by little"""
LONGEST_UNSEEN = 8
"""verifications of other sizes after which one without drafts does, and tells nothing of the machine as a whole"""
FEWER = 4.0
"""times as long as one of few, that no draft of many takes for that alone: what few take need not have been measured"""
NUM_ANCHORED = 8
"""drafts of one way, one after the other, from which on these tell what a pass takes"""
NOISE = 0.1
"""share by which one draft may take longer than another by accident: looks are at few sequences, and on a line through
what one and two took many would take anything"""
NUM_RESUMED = 9
"""newest drafts behind a rest, of which the median says what beginning again takes"""
NUM_GUESSED = 3
"""verifications of a size of batch, for which what smaller ones cost is taken from batches of other sizes"""
NEAR = 1.5
"""times as many tokens, that tell what a step without drafts takes: batches shrink one by one"""
SHORT_REST = 8
"""steps of a rest up to which few of them may have been measured"""
MOST_SET_ASIDE = 2 * NUM_ALIKE
"""steps that are not learnt from before it is known whether the machine has changed"""


@dataclass(slots=True)
class StepCost:
    """The seconds of one step, by what they were for. Those of a step that compiled or was held up are limited."""

    draft_s: float
    """catching up left out"""
    catch_up_s: float
    """reading what the sequences gained while they did not draft; a new sequence's prompt, too"""
    verify_s: float
    is_typical: bool = True
    """False: it was held up, went another way, or the machine has just become slower or faster"""
    beyond_s: float = 0.0
    """that the step took beyond these limits"""


@dataclass
class _Sequences(SlotTable):
    num_behind: IntArray
    """tokens gained since the sequence last drafted"""
    is_known: BoolArray
    """whether a step that it was in has been seen"""


class CostModel:
    """Seconds of a draft pass against the sequences in it, and of a verification against its packed tokens, for batches
    of different sizes apart.

    Assumptions. A step takes `start_s + passes * draft_s(sequences) + verify_s(tokens)`, tokens being one for every
    decoding sequence, all drafted ones and those of prompts read in the same pass. A pass in which fewer sequences
    still draft is taken at the mean number of them, unless all are in it whoever drafts. What drafting costs once a
    step is spread over the passes until drafts of different lengths were seen. The length of the context is not looked
    at: it changes slowly, and the measurements follow. Before the first measurement a verification takes 10 ms up to
    256 tokens and grows in proportion above, and a draft pass takes a tenth of a verification of as many tokens: only
    the ratio matters, and only until there is evidence.

    Identifiable at a batch size are the level of the draft and, as soon as lengths vary, the verification
    at as many sizes as there were lengths. What was never measured is taken to cost as little as is plausible (see
    `Curve`). A policy misled by that tries it, and then it has been measured; a guess on the dear side would never be
    put right.

    Steps in which a sequence had to catch up (after a pause, or because it is new) say nothing of a draft pass, and are
    used for `catch_up_s`; likewise those in which the draft began from rest, where that takes longer. Under a load
    where there is always somebody new they count after all.

    Where several steps in a row take longer, or shorter, than they are known to, the machine is taken to have changed
    as a whole, and everything costs as many times as much: sizes not in use just now would never be put right. Likewise
    where those in use change little by little.

    One model belongs to one policy or stage, which hands every outcome to `observe`.
    """

    def __init__(self, num_tried: int = 1, is_flat_below: bool = False) -> None:
        """A draft pass is believed to cost what it does once `num_tried` steps have drafted, and not before.

        With `is_flat_below` sizes below all that were measured cost no less, or little less. That is for a policy which
        would otherwise make many small passes, and which measures a step without drafts before it compares anything
        with it.
        """
        self._num_tried = num_tried
        self._verifications = Verifications(VERIFY_S, is_flat_below)
        self._draft = Curve(VERIFY_S * DRAFT_SHARE, is_flat_below, noise=NOISE)
        self._catch_up = Curve(VERIFY_S * DRAFT_SHARE)
        self._starts = Start(), Start()
        """of drafts of fixed lengths, and of those that a rule may end"""
        self._is_ruled = False
        """of these, the newest"""
        self._num_alike = 0
        """drafts like it, one after the other"""
        self._is_anchor_ruled = False
        """whether those that a rule may end tell what a pass takes"""
        self._prompt_steps = PromptSteps(VERIFY_S)
        self._resumes_s: deque[float] = deque(maxlen=NUM_RESUMED)
        self._tempo = Tempo()
        self._drift = Drift()
        self._aside: list[Outcome] = []
        """steps that may be the first of a machine that has changed"""
        self._sequences = _Sequences(num_behind=np.zeros(1, np.int64), is_known=np.zeros(1, np.bool_))
        self._num_unclean = 0
        self._num_idle = 0
        """steps since a draft was last measured"""
        self._whole_sizes: set[int] = set()
        """of batches that are as a whole in every draft pass"""
        self._least_rows = 1.0
        """sequences in any pass of the batch in question"""

    @property
    def num_measured(self) -> int:
        """Verifications seen, of any size."""
        return self._verifications.num_measured

    @property
    def _verify(self) -> Curve:
        return self._verifications.current

    def see(self, batch: BatchView) -> bool:
        """A step of this batch is to be planned: questions are about it from now on, and whoever knows what its draft
        has missed need not have it counted. Returns whether that is more than had been counted, or less."""
        size = size_of_batch(batch.num_sequences)
        (self._whole_sizes.add if batch.has_whole_passes else self._whole_sizes.discard)(size)
        self.turn_to(batch.num_sequences)
        if batch.num_missed is None:
            return False
        counted = self.num_behind(batch.slots)
        self._sequences.num_behind[batch.slots] = batch.num_missed
        # By a step, or a token that is read once more, it is often off.
        return abs(int(batch.num_missed.sum()) - counted) > 2 * batch.slots.size

    def turn_to(self, num_sequences: int) -> None:
        """Questions are about a batch of so many, until told otherwise: at first that of the newest step."""
        self._verifications.turn_to(num_sequences)
        self._prompt_steps.turn_to(num_sequences)
        self._least_rows = float(num_sequences) if size_of_batch(num_sequences) in self._whole_sizes else 1.0

    def draft_s(self, batch_sizes: ArrayLike) -> FloatArray:
        """Of one draft pass in which so many still draft."""
        if self._least_rows > 1:
            batch_sizes = np.maximum(batch_sizes, self._least_rows)
        if self._draft.num_measured >= self._num_tried:
            return self._draft.seconds(batch_sizes)
        return DRAFT_SHARE * self._verify.seconds(batch_sizes)

    @property
    def start_s(self) -> float:
        """Of a draft like the newest, beside its passes."""
        return self.start_of(self._is_ruled)

    @property
    def needs_another_length(self) -> bool:
        """Whether drafts of fixed lengths were all of one so far, and not few: what they take once is taken for a part
        of each pass, and longer ones seem dear."""
        return self._starts[False].is_stuck

    def start_of(self, is_ruled: bool) -> float:
        """The same of one that a rule may end, or none; of the former as of the latter, while nobody knows, unless they
        are those that tell what a pass takes: then it is in their passes."""
        return self._start(is_ruled).seconds

    def beside_of(self, is_ruled: bool) -> float:
        """The same, less than nothing where such drafts take less than their passes are taken to: on a CPU those that
        nobody looks at."""
        return self._start(is_ruled).beside_s

    def _start(self, is_ruled: bool) -> Start:
        is_told = self._starts[True].is_known or self._is_anchor_ruled
        return self._starts[is_ruled and is_told]

    def drafting_s(self, num_tokens: int, num_passes: int, is_ruled: bool = False) -> float:
        """Of drafting so many tokens in so many passes, nobody having to catch up."""
        if not num_passes:
            return 0.0
        return self.start_of(is_ruled) + num_passes * float(self.draft_s(max(num_tokens / num_passes, 1.0)))

    def verify_s(self, tokens: ArrayLike) -> FloatArray:
        """Of one verification of so many packed tokens."""
        return self._verify.seconds(tokens)

    def plain_s(self, num_sequences: int, num_tokens: int, is_odd: bool) -> float:
        """Of a step without drafts that reads so many tokens, of prompts as well; by another way if it `is_odd`."""
        self.turn_to(num_sequences)
        curve = (self._prompt_steps.curve if is_odd else None) or self._verify
        return float(curve.seconds(num_tokens))

    def usual_s(self, outcome: Outcome) -> float:
        """Of a step like it, nobody having to catch up."""
        self.turn_to(outcome.num_sequences)
        num_drafted = max(outcome.num_drafted, int(np.add.reduce(outcome.drafted))) + outcome.num_cut
        num_passes = max(outcome.num_draft_passes, int(outcome.drafted.max(initial=0))) if num_drafted else 0
        drafting_s = self.drafting_s(num_drafted, num_passes, outcome.is_ruled)
        return drafting_s + float(self.verify_s(_num_verified(outcome)))

    def spared_s(self, num_sequences: int, drafted: FloatArray, num_emitted: FloatArray) -> FloatArray | float:
        """By how much less than without prompts such steps take on average, because some read prompts anyway."""
        if self._prompt_steps.curve is None:
            return 0.0
        dearer_s = self.verify_s(num_sequences + drafted) - self.verify_s(num_sequences)
        return self._prompt_steps.spared_s(num_sequences, drafted, num_emitted, dearer_s)

    @property
    def resume_s(self) -> float:
        """By which everybody is later if drafts follow on steps without any, beyond what these drafts take, the host's
        work included; 0 where nobody tells."""
        return statistics.median(self._resumes_s) if self._resumes_s else 0.0

    def begin_s(self, slots: IntArray) -> float:
        """Of having these sequences drafted for, behind a rest, before there is a draft."""
        return float(self.catch_up_s(self.num_behind(slots))) + self.resume_s

    def catch_up_s(self, tokens: ArrayLike) -> FloatArray:
        """Of reading so many tokens before the draft can draft again; an ordinary pass over them until measured.

        No less than many tokens take beyond few: what was measured is what remained when a draft had been taken off at
        a price that may have been too high. And what is more than was ever read takes no longer beyond that than such
        passes do: of few tokens it is mostly what the host takes.
        """
        tokens = np.asarray(tokens, np.float64)
        pass_s = float(self.draft_s(1.0))
        seconds = pass_s * np.maximum(tokens / KNEE, 1.0)
        if self._catch_up.num_measured:
            largest = self._catch_up.largest
            most = self._catch_up.seconds(largest) + np.maximum(tokens - largest, 0.0) * pass_s / KNEE
            seconds = np.maximum(np.minimum(self._catch_up.seconds(tokens), most), seconds - pass_s)
        return np.where(tokens > 0, seconds, 0.0)

    def behind(self, slots: IntArray) -> IntArray:
        """[slots] tokens that the draft would have to read before these could draft; counted from when they were first
        seen, unless somebody knew better (`see`)."""
        self._sequences.cover(slots)
        return self._sequences.num_behind[slots]

    def _num_new(self, slots: IntArray) -> int:
        """How many of these were in no step that was seen."""
        self._sequences.cover(slots)
        return int(np.count_nonzero(~self._sequences.is_known[slots]))

    def num_behind(self, slots: IntArray) -> int:
        """The same of all of them together."""
        return int(self.behind(slots).sum())

    def renew_verified(self, outcome: Outcome) -> None:
        """It was made to see what so many tokens cost now: what that took before hardly counts beside it."""
        self.turn_to(outcome.num_sequences)
        is_measured = outcome.verify_s > 0 and not outcome.is_odd
        if is_measured and self.age(_num_verified(outcome)) >= LONGEST_UNSEEN:
            self._verify.renew(_num_verified(outcome), NUM_KEPT_ASIDE)

    def num_verified(self, tokens: float) -> int:
        """Verifications measured at about so many tokens."""
        return self._verify.num_near(tokens)

    @property
    def num_drafts(self) -> int:
        """Drafts measured, of any size, for which nothing else had to be read."""
        return self._draft.num_measured

    def is_measured(self, tokens: float) -> bool:
        """Whether verifications of so many tokens, or more, have been."""
        return self._verify.largest >= tokens

    @property
    def most_verified(self) -> int:
        """Tokens of the largest verification measured, about; 0: none."""
        sizes = self._verify.sizes
        return int(sizes[-1]) if sizes.size else 0

    def is_guess(self, batch: BatchView) -> bool:
        """Whether it is time to measure a step of this batch without drafts, since hardly any so small has been: before
        anything is compared with it, or where other sizes of batch tell about what it costs, after a while and where
        it can be done."""
        if batch.num_prompt_tokens or not self.is_below(batch.num_sequences):
            return False
        return self._verifications.is_first or (self._verify.num_measured >= NUM_GUESSED and self.can_rest(batch))

    def can_rest(self, batch: BatchView) -> bool:
        """Whether a step of this batch without drafts could be measured at little loss. Not while most are new: the
        draft would miss their prompts, and have to read them later. Nor beside prompts, which would be measured with
        it."""
        return not batch.num_prompt_tokens and 2 * self._num_new(batch.slots) <= batch.slots.size

    def is_below(self, tokens: float) -> bool:
        """Whether verifications of so many tokens, or fewer, have hardly been measured, nor of a few more."""
        return self._verify.num_at_most(NEAR * tokens) < self._num_tried

    def age(self, tokens: float) -> int:
        """Verifications since the last one of about so many tokens."""
        return self._verify.age(tokens)

    def observe(self, outcome: Outcome) -> StepCost:
        """Learn from a step, and say what its seconds were for."""
        self.turn_to(outcome.num_sequences)
        # Of a long rest it is the median, and no accident.
        for _ in range(NUM_ALIKE if outcome.num_steps > SHORT_REST else 1):
            self._follow_tempo(outcome)
        # Those of a machine that has just changed must not be kept with, and scaled like, those from before.
        self._aside.append(outcome)
        if not self._tempo.is_waiting or len(self._aside) == MOST_SET_ASIDE:
            for seen in self._aside:
                self.turn_to(seen.num_sequences)
                self._measure(seen)
            self._aside.clear()
        if outcome.delay_s > 0:
            measured_s = outcome.draft_s + outcome.verify_s - float(self.verify_s(outcome.num_sequences))
            self._resumes_s.append(max(outcome.delay_s - measured_s, 0.0))
        num_passes, num_drafted = _drafting(outcome)
        self._prompt_steps.observe(outcome, self.drafting_s(num_drafted, num_passes, outcome.is_ruled))
        self._follow(outcome)
        return self._split(outcome)

    def forget(self, slots: IntArray) -> None:
        """These sequences have ended."""
        self._sequences.reset(slots)

    def _follow_tempo(self, outcome: Outcome) -> None:
        # As many tokens of prompts may take longer or shorter, by what is before them.
        if outcome.num_prompt_tokens or outcome.is_odd or not outcome.verify_s > 0:
            self._tempo.pass_over()
            return
        num_verified = _num_verified(outcome)
        ratio = self._verify.ratio(num_verified, outcome.verify_s)
        if ratio is not None and self.age(num_verified) >= LONGEST_UNSEEN:
            self._tempo.pass_over()  # that size may be the only one that is not known well
            return
        if ratio is None and not self._verify.is_trusted:
            self._tempo.pass_over()  # steps of a batch size that is new do not tell, however many are waited for
            return
        factor = 1.0 if ratio is None else self._tempo.observe(ratio)
        if factor != 1.0:
            self._drift.scale(factor)
            self._scale(factor)

    def _follow_drift(self, outcome: Outcome) -> None:
        num_verified = _num_verified(outcome)
        if not outcome.num_prompt_tokens and self.num_verified(num_verified) >= NUM_SETTLED:
            size = size_of_batch(outcome.num_sequences), bucket_of(num_verified)
            self._scale(self._drift.observe(size, outcome.verify_s, outcome.num_steps))

    def _scale(self, factor: float) -> None:
        if factor != 1.0:
            for curve in (self._verifications, self._draft, self._catch_up, self._prompt_steps, *self._starts):
                curve.scale(factor)

    def _measure(self, outcome: Outcome) -> None:
        num_passes, num_drafted = _drafting(outcome)
        if outcome.verify_s > 0 and not outcome.is_odd:
            num_verified = _num_verified(outcome)
            is_plain = not num_passes and not outcome.num_drafted and not outcome.num_prompt_tokens
            if is_plain and (age := self.age(num_verified)) >= LONGEST_UNSEEN:
                self._verify.renew(num_verified, NUM_KEPT if age <= LONGEST_PAUSE else NUM_KEPT_LONG)
            self._follow_drift(outcome)
            self._verify.observe(num_verified, outcome.verify_s, outcome.num_steps)
        if not num_passes:
            self._num_idle += 0 if outcome.has_drafts else outcome.num_steps
            return
        self._turn_way(outcome.is_ruled)
        is_ruled = self._is_ruled
        is_behind = _is_behind(outcome)
        self._num_unclean = self._num_unclean + 1 if is_behind else 0
        if not is_behind or self._num_unclean > MOST_UNCLEAN:
            self._tell_apart(num_passes, num_drafted, outcome.draft_s)
        elif self._draft.num_measured:
            # Whatever else the draft did, its passes took no longer: while nobody drafts that is all to go by.
            if outcome.draft_s < self.drafting_s(num_drafted, num_passes, is_ruled):
                self._measure_draft(num_passes, num_drafted, outcome.draft_s)
            rest_s = outcome.draft_s - min(outcome.draft_s, self.drafting_s(num_drafted, num_passes, is_ruled))
            # Prompts, and a little where a draft reads it in passing, are read at another price.
            if not outcome.num_draft_prompt_tokens and outcome.num_catch_up_tokens > outcome.num_sequences:
                self._catch_up.observe(outcome.num_catch_up_tokens, rest_s)

    def _turn_way(self, is_ruled: bool) -> None:
        """A draft was made that way. Which one tells what a pass takes, and which only what remains, is changed when
        several were."""
        if is_ruled != self._is_ruled:
            self._is_ruled, self._num_alike = is_ruled, 0
            self._starts[is_ruled].renew()
        self._num_alike += 1
        if self._num_alike > NUM_ANCHORED or not self._draft.num_measured:
            self._is_anchor_ruled = is_ruled

    def _tell_apart(self, num_passes: int, num_drafted: int, draft_s: float) -> None:
        """What of a draft its passes took, and what it took once."""
        start, size = self._starts[self._is_ruled], max(num_drafted / num_passes, self._least_rows)
        if self._is_ruled != self._is_anchor_ruled and self._num_idle <= LONGEST_IDLE:
            # A few between others, which tell what a pass takes.
            start.observe_beside(num_passes, size, draft_s, float(self._draft.seconds(size)))
            self._num_idle = 0
            return
        self._measure_draft(num_passes, num_drafted, draft_s)
        if start.observe(num_passes, size, draft_s) and start.is_told:
            # Or else what it takes once would be in the passes as well, or in neither.
            passes, sizes, seconds = start.drafts.T
            self._draft.remember(sizes, np.maximum(seconds - start.seconds, seconds / 2) / passes)

    def _measure_draft(self, num_passes: int, num_drafted: int, draft_s: float) -> None:
        batch_size = max(num_drafted / num_passes, self._least_rows)
        is_new, least_s = self._num_idle > LONGEST_IDLE, 0.0
        if is_new:
            # Of whole drafts: what one takes once is not known as well, and next to nothing might remain of a pass.
            least_s = self.drafting_s(num_drafted, num_passes, self._is_ruled)
            least_s /= LEAST_CHANGE if self._draft.num_near(batch_size) >= NUM_TRUSTED else FEWER
            self._draft.renew(batch_size)
            for start in self._starts:
                start.pause()
        self._draft.observe(batch_size, max(draft_s - self.start_s, draft_s / 2) / num_passes)
        if self._draft.num_near(batch_size) >= self._num_tried:  # or else nobody believes it yet
            self._num_idle = 0
        if is_new and self.drafting_s(num_drafted, num_passes, self._is_ruled) < least_s:
            self._draft.keep(batch_size)

    def _split(self, outcome: Outcome) -> StepCost:
        verify_s = limit(outcome.verify_s, float(self.verify_s(_num_verified(outcome))))
        num_passes, num_drafted = _drafting(outcome)
        draft_s = catch_up_s = 0.0
        if num_passes and not (_is_behind(outcome) and self._num_unclean <= MOST_UNCLEAN):
            draft_s = limit(outcome.draft_s, self.drafting_s(num_drafted, num_passes, outcome.is_ruled))
        elif outcome.draft_s > 0:  # without a pass the draft only read, and nobody was ready to draft
            draft_s = min(outcome.draft_s, self.drafting_s(num_drafted, num_passes, outcome.is_ruled))
            catch_up_s = self._limited_catch_up_s(outcome.draft_s - draft_s, outcome)
        beyond_s = outcome.draft_s + outcome.verify_s - draft_s - catch_up_s - verify_s
        is_typical = not self._tempo.is_in_doubt and not outcome.is_odd
        return StepCost(draft_s, catch_up_s, verify_s, is_typical, max(beyond_s, 0.0))

    def _limited_catch_up_s(self, seconds: float, outcome: Outcome) -> float:
        """A draft without a model reads nothing, and may look for long, so a verification is the least to allow."""
        expected_s = self.catch_up_s(outcome.num_catch_up_tokens) + self.verify_s(max(outcome.slots.size, 1))
        return limit(seconds, float(expected_s))

    def _follow(self, outcome: Outcome) -> None:
        self._sequences.cover(outcome.slots)
        behind = self._sequences.num_behind[outcome.slots] + outcome.num_steps
        has_drafted = (outcome.drafted > 0) | (outcome.num_cut > 0)
        self._sequences.num_behind[outcome.slots] = np.where(has_drafted, 0, behind)
        self._sequences.is_known[outcome.slots] = True

    def to_dict(self) -> dict[str, Any]:
        """What was learnt, for JSON."""
        return {
            "version": 2,
            "start_s": self.start_of(False),
            "ruled_start_s": self.start_of(True),
            "verify": self._verifications.to_dict(),
            "draft": self._draft.to_dict(),
            "catch_up": self._catch_up.to_dict(),
        }

    @classmethod
    def from_dict(cls, saved: dict[str, Any]) -> CostModel:
        """The model that `to_dict` saved. Raises InvalidInput where it is none."""
        model = cls()
        model.restore(saved)
        return model

    def restore(self, saved: dict[str, Any]) -> None:
        """Take over what `to_dict` saved, nothing having been measured yet. Raises InvalidInput where it is none."""
        try:
            if saved["version"] not in (1, 2):
                raise ValueError("version")
            # Before batches of different sizes were told apart: a beginning for all of them.
            verify = saved["verify"] if saved["version"] == 2 else {"0": saved["verify"]}
            self._verifications.restore(verify)
            self._draft.restore(saved["draft"])
            self._catch_up.restore(saved["catch_up"])
            # Of an older file it is spread over the passes.
            self._starts[False].restore(_seconds(saved.get("start_s", 0.0)))
            self._starts[True].restore(_seconds(saved.get("ruled_start_s", saved.get("start_s", 0.0))))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InvalidInput(f"this is no saved cost model ({error}); measure again without it") from None


def _num_verified(outcome: Outcome) -> int:
    """Tokens of its verification."""
    return outcome.num_plain_tokens + max(outcome.num_drafted, int(np.add.reduce(outcome.drafted)))


def _drafting(outcome: Outcome) -> tuple[int, int]:
    """Passes and tokens of a draft that was timed; 0 of both where there was none."""
    num_passes = max(outcome.num_draft_passes, int(outcome.drafted.max(initial=0)))
    num_drafted = max(outcome.num_drafted, int(np.add.reduce(outcome.drafted))) + outcome.num_cut
    return (num_passes, num_drafted) if outcome.draft_s > 0 and num_passes and num_drafted else (0, 0)


def _is_behind(outcome: Outcome) -> bool:
    """Whether somebody's draft had missed something, however little: it is read in a pass of its own; or drafts began
    from rest."""
    return outcome.num_catch_up_tokens > 0 or outcome.num_draft_prompt_tokens > 0 or outcome.is_resumed


def limit(seconds: float, expected: float) -> float:
    """Seconds as measured, unless something out of the ordinary held the step up."""
    return min(seconds, LARGEST_EXCESS * expected)


def _seconds(value: object) -> float:
    if not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ValueError("start_s")
    return float(value)
