"""Carries out a step that has been scheduled and planned: draft, read, judge.

`HostExecutor` does it call by call, the host looking at every result: the CPU's way, and the only one for requests
whose logits are edited by their own tokens. `engine/device_executor.py` queues it all on a device instead. Both answer
with a `Flight`, which lands with the same things. Knows nothing of requests, policies or texts.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from dsde.core.consultant import Consultant
from dsde.core.selection import VerifyBudget
from dsde.core.sequence import Sequence
from dsde.core.stops import SIGNALS, Stop
from dsde.drafting import Drafter, Proposals
from dsde.engine.scheduler import Schedule
from dsde.engine.target import TargetRunner
from dsde.sampling import Sampler
from dsde.verification import Verdict, verify
from dsde.verification.synthetic import SyntheticRates

IntArray = NDArray[np.int64]

MOST_ALONE = 8
"""Sequences of a step that a device makes without the host, at most: if one of them ends the next one is left to the
host, and the more there are the oftener that happens."""


@dataclass(slots=True)
class Seconds:
    """How long the parts of a step took, for the whole batch; on a device as its own clock says."""

    draft: float = 0.0
    target: float = 0.0
    accept: float = 0.0
    idle: float = 0.0
    """the device had nothing to do before this step"""

    @property
    def verify(self) -> float:
        return self.target + self.accept


@dataclass(slots=True)
class DraftWish:
    """How far to draft, and what somebody wants to know about it."""

    lengths: IntArray
    """[decoding]"""
    stop: Stop | None = None
    want_klds: bool = False
    want_token_probs: bool = False
    want_draft_signals: bool = False
    budget: VerifyBudget | None = None
    consultant: Consultant | None = None
    chosen: IntArray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    """sequences that budget and consultant are for: those whose length the policy chose"""
    is_steady: bool = False
    """whether the next step is taken to be for the same sequences, and nobody wants to see logits afterwards"""

    @property
    def wants_signals(self) -> bool:
        """Whether somebody is to be told what the draft's distributions were like."""
        return self.want_token_probs or self.want_draft_signals

    @property
    def is_watched(self) -> bool:
        """Whether the draft's distributions are looked at, by whomever."""
        return self.stop is not None or self.budget is not None or self.wants_signals


@dataclass(slots=True)
class Landing:
    """What a step found."""

    verdict: Verdict
    logits: torch.Tensor
    """[sum(1 + drafted), vocab] of the judged sequences; good until the next step is queued"""
    prompt_logits: torch.Tensor
    """of prompts to be scored, a row for every token they read"""
    seconds: Seconds
    num_draft_passes: int
    """as in Proposals"""
    token_probs: NDArray[np.float64] | None = None
    """[sum(drafted)] as in Proposals"""
    draft_signals: NDArray[np.float64] | None = None
    """[sum(drafted), 3] likewise"""
    draft_tokens: torch.Tensor | None = None
    """[judged, K] as in Proposals; None where they never left the device"""
    is_cold: bool = False
    """a pass ran for the first times: the seconds say nothing of the next step like this"""
    is_padded: bool = False
    """a pass was larger than it had to be, for once: neither do they"""
    is_resumed: bool = False
    """the draft began from rest, and may have taken longer than one that follows on another"""
    is_by_heart: bool = False
    """the rule was not asked: everybody drafted what it expects"""

    @property
    def drafting_s(self) -> float:
        """What the draft cost: its passes and, before them, the device's waiting for the host. Most steps without a
        draft are queued ahead and have none."""
        return self.seconds.draft + (self.seconds.idle if self.num_draft_passes else 0.0)


class Flight(Protocol):
    """A step that is under way."""

    judged: list[Sequence]
    """sequences that get tokens: those decoding, then those whose prompt ends in this step"""
    drafted: IntArray
    """[judged]"""

    @property
    def num_catch_up_tokens(self) -> IntArray | None:
        """[decoding] as in Proposals"""

    def land(self) -> Landing:
        """Wait for the step's end. Once."""


class Executor(Protocol):
    is_asynchronous: bool
    """whether `launch` returns before the step is done"""
    makes_solos: bool
    """whether a device may make steps before they are planned, if it can"""

    @property
    def num_ahead(self) -> int:
        """tokens beyond those it was told to draft that it may want KV memory for"""

    @property
    def most_whole(self) -> int:
        """batches of up to so many are as a whole in every pass of a draft that a rule may end, whoever still drafts"""

    def launch(self, work: Schedule, wish: DraftWish, scored: set[Sequence]) -> Flight:
        """Draft for the decoding sequences, let the target read everything, judge. `scored` prompts bring a row of
        logits for every token they read."""

    def rehearse(self, most: int) -> None:
        """Prepare for steps of up to so many sequences whose drafts a rule may end anywhere. Nothing is under way."""

    def has_made(self, decodes: list[Sequence]) -> bool:
        """Whether the next step has been made, before anybody planned it, for these and others who have ended since."""

    def follow(self, flight: Flight) -> Flight | None:
        """Launch the step after `flight`, whose verdict nobody has seen yet: the same sequences, each with its next
        token, no drafts. None if that cannot be done."""

    def reset(self) -> None:
        """Nothing is under way any more: the work is done."""

    def recover(self) -> None:
        """The same after an error: nothing that was prepared can be trusted, and memory may be short."""


def propose(drafter: Drafter, decodes: list[Sequence], wish: DraftWish) -> Proposals:
    """Draft, and cut off what is not to be verified."""
    budget = wish.budget
    want_signals = wish.want_draft_signals or budget is not None
    proposals = drafter.propose(decodes, wish.lengths, wish.stop, wish.want_token_probs, want_signals)
    if budget is not None and proposals.signals is not None:
        confidences = proposals.signals[:, :, SIGNALS.index(budget.signal)]
        proposals = proposals.cut(budget.select(confidences, proposals.lengths, wish.chosen))
    return proposals


def judged_sequences(work: Schedule) -> list[Sequence]:
    return [*work.decodes, *work.joining]


@dataclass(slots=True)
class HostFlight:
    """Already landed."""

    judged: list[Sequence]
    drafted: IntArray
    num_catch_up_tokens: IntArray | None
    landing: Landing

    def land(self) -> Landing:
        return self.landing


class HostExecutor:
    is_asynchronous = False
    makes_solos = False
    num_ahead = 0
    most_whole = 0

    def __init__(
        self,
        target: TargetRunner,
        drafter: Drafter | None,
        sampler: Sampler,
        synthetic_acceptance: SyntheticRates | None,
    ) -> None:
        self.target = target
        self.drafter = drafter
        self.sampler = sampler
        self.synthetic_acceptance = synthetic_acceptance

    def launch(self, work: Schedule, wish: DraftWish, scored: set[Sequence]) -> HostFlight:
        self.sampler.begin_step()
        times = [time.perf_counter()]
        if self.drafter is None or not wish.lengths.any():
            proposals = Proposals.nothing(len(work.decodes), self.target.model.device)
        else:
            proposals = propose(self.drafter, work.decodes, wish)
        times.append(time.perf_counter())
        logits, prompt_logits = self.target.run(work, proposals, scored)
        times.append(time.perf_counter())
        judged = judged_sequences(work)
        proposals = proposals.followed_by(len(judged) - len(work.decodes))
        leniency = None
        if wish.consultant is not None:
            chosen = np.zeros(len(judged), dtype=bool)
            chosen[wish.chosen] = True
            leniency = (wish.consultant, chosen)
        verdict = verify(logits, judged, proposals, self.sampler, wish.want_klds, self.synthetic_acceptance, leniency)
        times.append(time.perf_counter())
        seconds = Seconds(*np.diff(times).tolist())
        landing = Landing(
            verdict,
            logits,
            prompt_logits,
            seconds,
            proposals.num_passes,
            proposals.drafted_only(proposals.token_probs),
            proposals.drafted_only(proposals.signals) if wish.want_draft_signals else None,
            proposals.tokens,
        )
        return HostFlight(judged, proposals.lengths, proposals.num_catch_up_tokens, landing)

    def rehearse(self, most: int) -> None:
        pass

    def has_made(self, decodes: list[Sequence]) -> bool:
        return False

    def follow(self, flight: Flight) -> Flight | None:
        return None

    def reset(self) -> None:
        pass

    def recover(self) -> None:
        pass
