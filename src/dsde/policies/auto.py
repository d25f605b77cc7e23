"""`auto`: every further token of every sequence must earn more than it costs. See docs/auto.md.

Joins what others have apart: how likely this very token is to stand (`AcceptanceModel`, from the draft's own
distribution and from what stood of late), and what it costs on this machine under this load (`CostModel`). Both are
learnt while serving. Knows nothing of models, of tokens or of what is being written.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dsde.core.stops import StopByWorth
from dsde.policies.acceptance import AcceptanceModel
from dsde.policies.base import BatchView, FloatArray, IntArray, Need, Outcome, Plan, Policy
from dsde.policies.cost import CostModel, count_tokens
from dsde.policies.limits import LONGEST, check_whole
from dsde.policies.probe import Probe

HIGHEST_OUTLOOK = 0.999
_LEVELS = np.geomspace(0.01, 0.99, 24)
_FEW = 200
"""tokens of which every one's chance is tried as a level"""
NUM_TRIED = 4
"""measurements of a size before it is believed"""
FIRST_REACH = 2
"""tokens that the first drafts may have; twice as many after every step that drafted"""
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
    num_tokens: int
    """that would be verified"""
    num_first: int
    """sequences in the first draft pass"""
    last_gain: FloatArray
    """[batch] chance of the last token taken; 1 where none is"""
    next_gain: FloatArray
    """of the first not taken"""


class Auto(Policy):
    """Lengths for the whole batch that bring the most tokens per second, and a stop where a token turns out risky.

    A sequence's tokens are worth the chance that the draft stands up to them. A first choice of lengths takes every
    position at the sequence's average; while they are drafted, each is looked at, and what it is worth then decides
    whether it is verified and whether another one is drawn. Costs are counted in tokens: seconds times the rate at
    which this batch could emit instead. A draft pass that all share is made if those who would take part in it are
    together worth it. Length 0, for one or for all, is an answer like any other; while all are at 0 a hundredth of the
    time is spent on looking again.
    """

    needs = Need.DRAFT_SIGNALS

    def __init__(self, max: int = 20, cost: CostModel | None = None) -> None:
        check_whole("max", max, 1, LONGEST)
        self.max = max
        # On a device the first two passes of a shape are slow, and whoever they put off would never see a third.
        self.cost = cost or CostModel(num_trusted=NUM_TRIED, num_tried=NUM_TRIED)
        self.acceptance = AcceptanceModel()
        self._gain = 1.0
        """realised over planned rate while drafting, lately"""
        self._planned_rate = 0.0
        self._reach = min(FIRST_REACH, max)
        self._probe = Probe(self.cost, max)

    @property
    def cost_models(self) -> list[CostModel]:
        return [self.cost]

    def plan(self, batch: BatchView) -> Plan:
        outlooks, doubts = self.acceptance.outlooks(batch.slots)
        # The benefit of the doubt: whoever drafts too little is never seen to deserve more. Many are not all in doubt
        # the same way.
        doubts /= np.sqrt(max(batch.slots.size, 1))
        choice = self._choose(batch, np.minimum(outlooks + doubts, HIGHEST_OUTLOOK))
        pays = choice.lengths.any() and choice.rate * self._gain > choice.rate_off
        num_emitted = max(batch.num_decoding, batch.slots.size) + _num_accepted(outlooks, choice.lengths)
        self._planned_rate = num_emitted / choice.seconds if pays else 0.0
        rate = max(self._planned_rate * self._gain, choice.rate_off)
        # A draft whose tokens all look sure may go well beyond what is usual. Not so the first ones: they are priced
        # before anything has been measured.
        lengths = np.minimum(2 * choice.lengths + 2, self._reach) if pays else choice.lengths * 0
        lengths = np.minimum(np.where(choice.lengths > 0, lengths, 0), batch.rooms)
        is_probing = not lengths.any() and self._probe.begin(batch)
        if is_probing:
            lengths = np.minimum(self._probe.length(batch), batch.rooms)
        num = batch.slots.size
        verify_s, each_s, pass_s = self._prices(choice)
        stop = StopByWorth(
            weights=self.acceptance.weights[1:].copy(),
            offsets=self.acceptance.offsets(batch.slots),
            outlooks=np.minimum(outlooks, HIGHEST_OUTLOOK),
            keep_above=rate * verify_s,
            go_on_above=rate * (verify_s + each_s),
            pass_above=rate * pass_s,
        )
        return Plan(
            lengths=lengths,
            predicted=choice.lengths.astype(np.float64),
            votes=np.ones(num, np.bool_),
            stop=stop if lengths.any() and not is_probing else None,
            signals={
                "outlook": outlooks,
                "gain_of_last": choice.last_gain,
                "gain_of_next": choice.next_gain,
                "cost_of_token": np.full(num, rate * (verify_s + each_s)),
                "cost_of_pass": np.full(num, rate * pass_s),
                "rate": np.full(num, rate),
                "rate_off": np.full(num, choice.rate_off),
            },
        )

    def observe(self, outcome: Outcome) -> None:
        step = self.cost.observe(outcome)
        plain_s = float(self.cost.verify_s(max(count_tokens(outcome), 1)))
        self.acceptance.observe(outcome)
        kept = float(np.exp(-1 / GAIN_MEMORY))
        if not outcome.drafted.any() and not outcome.num_draft_passes:
            self._probe.save(plain_s)
            self._gain = kept * self._gain + 1 - kept  # or a bad time would never be over
            return
        self._reach = min(2 * self._reach, self.max)
        seconds = step.draft_s + step.verify_s
        if self._probe.is_under_way:
            self._probe.end(step, plain_s)
        elif self._planned_rate > 0 and seconds > 0:
            emitted = float(outcome.accepted.sum()) + max(outcome.num_decoding, outcome.slots.size)
            gain = emitted / (seconds * self._planned_rate)
            self._gain = float(np.clip(kept * self._gain + (1 - kept) * gain, 0.5, 2.0))

    def forget(self, slots: IntArray) -> None:
        self.acceptance.forget(slots)
        self.cost.forget(slots)

    def _choose(self, batch: BatchView, outlooks: FloatArray) -> _Choice:
        """Of all tokens that are likelier than some level, in so many passes: the level and the passes that pay best.

        A sequence's tokens become less likely along its draft, so those above a level are always whole beginnings.
        """
        num_base = max(batch.num_decoding, batch.slots.size)
        num_plain = max(num_base + batch.num_prompt_tokens, 1)
        depths = np.arange(1, self.max + 1)
        chances = np.where(depths <= batch.rooms[:, None], outlooks[:, None] ** depths, 0.0)
        levels = np.maximum(chances.ravel(), _LEVELS[0]) if chances.size <= _FEW else _LEVELS
        taken = chances >= levels[:, None, None]
        counts = np.add.reduce(taken, axis=1)
        gains = np.add.reduce(chances * taken, axis=1)
        packed = num_plain + np.add.accumulate(counts, axis=1)
        draft_s = np.where(counts > 0, self.cost.draft_s(np.maximum(counts, 1)), 0.0)
        seconds = np.add.accumulate(draft_s, axis=1) + self.cost.verify_s(packed)
        rates = (num_base + np.add.accumulate(gains, axis=1)) / seconds
        level, last = np.unravel_index(int(rates.argmax()), rates.shape)
        plain_s = float(self.cost.verify_s(num_plain))
        rate, rate_off = float(rates[level, last]), num_base / plain_s
        if rate <= rate_off:
            lengths, rate, best_s, num_tokens = batch.rooms * 0, rate_off, plain_s, num_plain
        else:
            lengths = np.add.reduce(taken[level, :, : last + 1], axis=1)
            best_s, num_tokens = float(seconds[level, last]), int(packed[level, last])
        return _Choice(
            lengths=lengths,
            rate=rate,
            seconds=best_s,
            rate_off=rate_off,
            num_tokens=num_tokens,
            num_first=int((lengths > 0).sum()),
            last_gain=outlooks**lengths,
            next_gain=outlooks ** (lengths + 1),
        )

    def _prices(self, choice: _Choice) -> tuple[float, float, float]:
        """Seconds of verifying one more token, of one more sequence in a draft pass, and of a pass."""
        # The dearer half of the tokens chosen: beyond them there may be nothing measured to go by.
        last_half = max(int(choice.lengths.sum()) // 2, 1)
        verify_s = self.cost.verify_s([max(choice.num_tokens - last_half, 1), choice.num_tokens])
        num = max(choice.num_first, 1)
        draft_s = self.cost.draft_s([max(num // 2, 1), num])
        each_s = float(draft_s[1] - draft_s[0]) / max(num - num // 2, 1) if num > 1 else 0.0
        return float(verify_s[1] - verify_s[0]) / last_half, each_s, float(draft_s[1]) - num * each_s


def _num_accepted(outlooks: FloatArray, lengths: IntArray) -> float:
    """Expected of drafts of these lengths."""
    outlooks = np.minimum(outlooks, HIGHEST_OUTLOOK)
    return float((outlooks * (1 - outlooks**lengths) / (1 - outlooks)).sum())
