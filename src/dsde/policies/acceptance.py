"""How likely a drafted token is to stand, learnt from every verification, while serving.

Of a sequence there is its *outlook*: the chance of a position that nobody has looked at yet, from what stood of late,
drawn towards everybody's rate while little is known. How far back one should look depends on what is being written, so
several memories are kept, and those that foretold best lately count. Of a position that has been looked at there is a
logistic regression, shared by all requests and never finished: its log-odds are linear in what the draft's distribution
looks like there (`make_looks`: root of the entropy, log-odds of the top probability, margin) and in the log-odds of the
sequence's outlook. So it is learnt, too, how much history still says beside the signals. Only positions up to the first
rejection are learnt from; those behind it were never tested. Knows nothing of costs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsde.core.stops import make_looks
from dsde.policies.base import FloatArray, IntArray, Outcome
from dsde.policies.slots import SlotTable

NUM_LOOKS = 3
PRIOR_WEIGHTS = np.array([-0.2, 0.7, -0.3, 0.7, 0.5])
"""constant, history, and what looks are: sure drafts are accepted, others as by a coin"""
PRIOR_PRECISION = 1.0
"""of each of them: worth about ten tokens"""
FARTHEST = 1.0
"""that the log-odds of any position may move in one step"""
MEMORY = 4096.0
"""tested tokens, of all requests, after which what was learnt from others counts about a third"""
MEMORIES = np.array([8.0, 24.0, 96.0, 96.0, 96.0])
"""the same of a sequence's own: a request that turns from prose to code is another one soon"""
STRENGTHS = np.array([2.0, 4.0, 2.0, 8.0, 48.0])
"""tested tokens that everybody's rate counts for beside them"""
CONTEST = 1024.0
"""tested tokens after which it counts about a third how well a memory foretold"""
LEAST_CONTESTED = 16.0
"""tested tokens that what was found before them counts for at least"""
OWN_CONTEST = 24.0
"""the same of a sequence's own tokens"""
OTHERS = 128.0
"""tested tokens that what was found with all counts for beside them"""
PRIOR_RATE, PRIOR_VOICES = 0.7, 2.0
"""of everybody before anything was tested, and how many voices outweigh it"""
ONE_VOICE = 4.0
"""tested tokens that give a sequence half a voice on everybody's rate"""
RATE_MEMORY = 8.0
"""voices after which one counts about a third"""
IDLE_MEMORY = 128.0
"""steps without drafts after which what was found before counts about a third"""
LOWEST, HIGHEST = 0.005, 0.995
"""outlooks"""

FEW_AT_ONCE = 8
"""tested tokens that the weights are learnt from at once, at least, when somebody asks for them: one takes as long as
many"""
MANY_AT_ONCE = 512
"""the most, whether somebody asks or not"""
NUM_EAGER = 64
"""the first of all, which are learnt from as soon as somebody asks"""

_PRIOR: FloatArray = np.eye(2 + NUM_LOOKS) * PRIOR_PRECISION


@dataclass(slots=True)
class _Lesson:
    """What the weights are to learn from a step."""

    outcome: Outcome
    num_tested: IntArray
    history: FloatArray
    """[sequences] log-odds of their outlooks"""


@dataclass
class _Sequences(SlotTable):
    sums: FloatArray
    """[slots, 3, memories] fading: tokens accepted, tokens tested, and the log-probability of what was found; in one,
    since looking up a few slots takes as long as working with them"""
    num_tested: FloatArray
    """[slots] tokens so far, fading only while the sequence does not draft"""

    def of(self, slots: IntArray) -> FloatArray:
        """[slots, 3, memories] a copy"""
        self.cover(slots)
        return self.sums[slots]


@dataclass(slots=True)
class _View:
    """What is known of some sequences."""

    slots: IntArray
    sums: FloatArray
    """a copy"""
    guesses: FloatArray
    """[slots, memories]"""
    trust: FloatArray
    """[slots, memories]"""
    outlooks: FloatArray


class AcceptanceModel:
    def __init__(self) -> None:
        self._weights = PRIOR_WEIGHTS.copy()
        self._information = _PRIOR.copy()
        self._lessons: list[_Lesson] = []
        self._num_due = 0
        """tested tokens in them"""
        self._num_learnt = 0
        """before them"""
        self._num_accepted, self._num_tested = PRIOR_RATE * PRIOR_VOICES, PRIOR_VOICES
        self._evidence = np.zeros(MEMORIES.size)
        """log-probability of what was found, by memory, fading"""
        self._num_contested = 1.0
        self._sequences = _Sequences(np.zeros((1, 3, MEMORIES.size)), np.zeros(1))
        self._view: _View | None = None
        """of those who were asked for last, if nothing has been learnt since"""

    @property
    def rate(self) -> float:
        """Of tested tokens that stood, lately, over all requests."""
        return min(max(self._num_accepted / self._num_tested, LOWEST), HIGHEST)

    @property
    def weights(self) -> FloatArray:
        """Of the regression: constant, history and looks."""
        if self._num_due >= FEW_AT_ONCE or (self._num_due and self._num_learnt < NUM_EAGER):
            self._learn_weights()
        return self._weights

    def outlooks(self, slots: IntArray) -> tuple[FloatArray, FloatArray]:
        """[slots] chance of a position that nobody has looked at yet, and how far off that may well be."""
        view = self._view = self._look_up(slots)
        num_tested = view.sums[:, 1] + STRENGTHS
        outlooks = view.outlooks
        return outlooks, np.sqrt(outlooks * (1 - outlooks) / np.add.reduce(num_tested * view.trust, axis=1))

    def offsets(self, outlooks: FloatArray) -> FloatArray:
        """Log-odds of a position of sequences with these outlooks, before its signals."""
        constant, history = self.weights[:2].tolist()
        offsets: FloatArray = constant + history * _log_odds(outlooks)
        return offsets

    def observe(self, outcome: Outcome) -> None:
        """Learn from a step, and let what is known of those who did not draft fade."""
        slots, accepted = outcome.slots, outcome.accepted
        num_tested = np.minimum(accepted + 1, outcome.drafted)
        total = int(num_tested.sum())
        # A rest is a long time for whoever did not draft.
        ages = np.maximum(num_tested, outcome.num_steps)
        outlooks = self._observe_sequences(slots, accepted[:, None], num_tested[:, None], ages[:, None], total)
        if not total:
            self._fade(outcome.num_steps)
            return
        if outcome.draft_signals.shape[0] != int(np.add.reduce(outcome.drafted)):
            return  # nobody looked
        self._lessons.append(_Lesson(outcome, num_tested, _log_odds(outlooks)))
        self._num_due += total
        if self._num_due >= MANY_AT_ONCE:
            self._learn_weights()

    def forget(self, slots: IntArray) -> None:
        self._sequences.reset(slots)
        self._view = None

    def _fade(self, num_steps: int) -> None:
        """Nobody drafts: what was found of everybody is of yesterday soon, and few new findings must outweigh it."""
        kept = math.exp(-num_steps / IDLE_MEMORY)
        kept_rate = max(kept, min(PRIOR_VOICES / self._num_tested, 1.0))
        self._num_accepted, self._num_tested = kept_rate * self._num_accepted, kept_rate * self._num_tested
        kept_trust = max(kept, min(LEAST_CONTESTED / self._num_contested, 1.0))
        self._evidence, self._num_contested = kept_trust * self._evidence, kept_trust * self._num_contested

    def _look_up(self, slots: IntArray) -> _View:
        sums = self._sequences.of(slots)
        guesses = (sums[:, 0] + STRENGTHS * self.rate) / (sums[:, 1] + STRENGTHS)
        guesses = np.minimum(np.maximum(guesses, LOWEST), HIGHEST)
        trust = self._trust(sums[:, 2])
        return _View(slots, sums, guesses, trust, np.add.reduce(guesses * trust, axis=1))

    def _trust(self, evidence: FloatArray) -> FloatArray:
        """[slots, memories] by how well they foretold of late: these sequences, and all."""
        evidence = evidence + self._evidence * (OTHERS / self._num_contested)
        trust = np.exp(evidence - np.maximum.reduce(evidence, axis=1)[:, None])
        trusts: FloatArray = trust / np.add.reduce(trust, axis=1)[:, None]
        return trusts

    def _observe_sequences(
        self, slots: IntArray, accepted: IntArray, num_tested: IntArray, ages: IntArray, total: int
    ) -> FloatArray:
        """Returns the outlooks before."""
        view, self._view = self._view, None
        if view is None or not np.array_equal(view.slots, slots):
            view = self._look_up(slots)
        sums, guesses = view.sums, view.guesses
        all_accepted, all_tested, evidence = sums[:, 0], sums[:, 1], sums[:, 2]
        sums[:, :2] *= np.exp(-ages / MEMORIES)[:, None]
        own_tested = self._sequences.num_tested[slots]
        if not num_tested.all():
            own_tested = own_tested * np.exp(np.where(num_tested[:, 0] > 0, 0, -ages[:, 0]) / MEMORIES[-1])
        self._sequences.num_tested[slots] = own_tested + num_tested[:, 0]
        all_accepted += accepted
        all_tested += num_tested
        if total:
            # Every sequence counts once, or those that draft much, because they are easy, would speak for all who are
            # to come; or those that stay long, because they are hard. What a token counts is known before it is tested:
            # otherwise drafts that were rejected soon would count more.
            shares = ONE_VOICE / (own_tested + ONE_VOICE) ** 2
            voices = float(shares @ num_tested[:, 0])
            kept_rate = math.exp(-voices / RATE_MEMORY)
            self._num_accepted = kept_rate * self._num_accepted + float(shares @ accepted[:, 0])
            self._num_tested = kept_rate * self._num_tested + voices
            found = accepted * np.log(guesses) + (num_tested - accepted) * np.log1p(-guesses)
            faded = math.exp(-total / CONTEST)
            self._evidence = faded * self._evidence + np.add.reduce(found, axis=0)
            self._num_contested = faded * self._num_contested + total
            evidence *= np.exp(-num_tested / OWN_CONTEST)
            evidence += found
        self._sequences.sums[slots] = sums
        return view.outlooks

    def _learn_weights(self) -> None:
        """One step of Newton's method, where the curvature is that of everything seen so far, fading."""
        lessons, self._lessons = self._lessons, []
        self._num_learnt, self._num_due = self._num_learnt + self._num_due, 0
        owners, stood, signals = _tested(lessons)
        history = _joined([lesson.history for lesson in lessons])
        if not np.isfinite(signals).all():
            is_known = np.isfinite(signals).all(axis=1)
            signals, owners, stood = signals[is_known], owners[is_known], stood[is_known]
        looks = np.empty((stood.size, 2 + NUM_LOOKS))
        looks[:, 0] = 1.0
        looks[:, 1] = history[owners]
        looks[:, 2:] = make_looks(signals)
        chances = 1 / (1 + np.exp(-(looks @ self._weights)))
        missing, doubts = stood - chances, chances * (1 - chances)
        kept = math.exp(-missing.size / MEMORY)
        self._information = kept * self._information + (1 - kept) * _PRIOR + looks.T @ (looks * doubts[:, None])
        step = np.linalg.solve(self._information, looks.T @ missing)
        # A large batch at once, far from what was thought, would lead anywhere: the curvature is that of this place.
        farthest = float(np.abs(looks @ step).max(initial=0.0))
        self._weights = self._weights + step / max(farthest / FARTHEST, 1.0)


def _joined(arrays: list[NDArray[Any]]) -> NDArray[Any]:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def _log_odds(chances: FloatArray) -> FloatArray:
    odds: FloatArray = np.log(chances / (1 - chances))
    return odds


def _tested(lessons: list[_Lesson]) -> tuple[IntArray, FloatArray, FloatArray]:
    """Of every tested token: the sequence, whether it stood, and its signals."""
    num_tested = _joined([lesson.num_tested for lesson in lessons])
    drafted = _joined([lesson.outcome.drafted for lesson in lessons])
    accepted = _joined([lesson.outcome.accepted for lesson in lessons])
    firsts = np.add.accumulate(drafted) - drafted
    owners = np.repeat(np.arange(drafted.size), num_tested)
    depths = np.arange(owners.size) - np.repeat(np.add.accumulate(num_tested) - num_tested, num_tested)
    signals = _joined([lesson.outcome.draft_signals for lesson in lessons])
    return owners, (depths < accepted[owners]).astype(np.float64), signals[firsts[owners] + depths]
