"""Steps that read prompts, where these go another and slower way than others: how often they come, and what they take.

Prompts are read whether or not anybody drafts, so as a rule they say nothing of what drafts are worth. But where a step
goes in pieces because it reads one, and takes as long whatever else is in it, drafts in that step cost next to nothing.
Knows nothing of what is in prompts.
"""

from __future__ import annotations

import math
import statistics
from collections import deque

import numpy as np

from dsde.policies.base import FloatArray, Outcome
from dsde.policies.curve import Curve
from dsde.policies.verifications import Verifications

MEMORY = 256.0
"""steps after which one counts about a third"""
NUM_HELD = 15
"""newest drafts beside prompts"""


class PromptSteps:
    def __init__(self, prior_s: float) -> None:
        self._verifications = Verifications(prior_s, is_flat_below=True)
        self._num_steps = self._num_tokens = self._num_emitted = 0.0
        """such steps of late, tokens of their prompts, and tokens that all steps brought"""
        self._drafts_s: deque[float] = deque(maxlen=NUM_HELD)
        """that drafting took beyond what it takes elsewhere"""

    def turn_to(self, num_sequences: int) -> None:
        """From now on, whoever asks means a batch of so many."""
        self._verifications.turn_to(num_sequences)

    @property
    def curve(self) -> Curve | None:
        """Seconds of such a step against all tokens that it reads; None: nobody knows."""
        return self._verifications.current if self._verifications.num_measured else None

    def scale(self, factor: float) -> None:
        self._verifications.scale(factor)

    def observe(self, outcome: Outcome, usual_draft_s: float) -> None:
        """A step, or a rest of many. Its draft would have taken `usual_draft_s` without prompts."""
        kept = math.exp(-outcome.num_steps / MEMORY)
        self._num_steps, self._num_tokens, self._num_emitted = (
            kept * number for number in (self._num_steps, self._num_tokens, self._num_emitted)
        )
        self._num_emitted += outcome.num_sequences * outcome.num_steps + float(outcome.accepted.sum())
        if outcome.num_draft_prompt_tokens and outcome.draft_s > 0 and not outcome.num_catch_up_tokens:
            self._drafts_s.append(max(outcome.draft_s - usual_draft_s, 0.0))
        steps = list(outcome.prompt_steps)
        if outcome.num_prompt_tokens and outcome.is_odd:
            steps.append((outcome.num_prompt_tokens, outcome.verify_s))
        self.turn_to(outcome.num_sequences)
        num_others = outcome.num_sequences + outcome.num_drafted
        for num_tokens, seconds in steps:
            self._num_steps += 1
            self._num_tokens += num_tokens
            if seconds > 0:
                self._verifications.current.observe(num_others + num_tokens, seconds)

    def spared_s(
        self, num_sequences: int, drafted: FloatArray, num_emitted: FloatArray, dearer_s: FloatArray
    ) -> FloatArray | float:
        """By how much less, on average, a step with so many `drafted` tokens takes than without prompts, where each
        brings `num_emitted` and verifying them takes `dearer_s` longer than a step without drafts."""
        curve = self.curve
        if not self._num_steps or curve is None:
            return 0.0
        num_tokens = num_sequences + self._num_tokens / self._num_steps
        # As many prompts are read for as many tokens, however few steps it takes.
        share = np.minimum(self._num_steps / self._num_emitted * num_emitted, 1.0)
        dearer_beside_s = curve.seconds(num_tokens + drafted) - curve.seconds(num_tokens)
        read_s = statistics.median(self._drafts_s) if self._drafts_s else 0.0
        spared: FloatArray = share * (dearer_s - dearer_beside_s - read_s)
        return spared
