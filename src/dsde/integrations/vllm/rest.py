"""Steps in which nobody drafts, known to be such beforehand: nothing is decided in them, and they are told as one.

In a small model's step the device waits for the host, so what a step costs without drafts is what the host does in it.
Knows which steps belong to a rest, and what they took; knows nothing of policies.
"""

from __future__ import annotations

import statistics
from collections import deque
from typing import Any

import numpy as np

from dsde.integrations.vllm.messages import Directive
from dsde.policies import BatchView, Outcome

LONGEST_REST = 128
"""steps after which the policy is asked again, even if it wants nothing"""
NUM_TIMED = 4
"""first steps of a rest that are measured on the device; it may end soon"""
STEPS_PER_TIMED = 32
"""of those after them, of which one is: together with the one before, whose end is its beginning"""
LEAST_MEASURED = 2
"""steps of a longer rest that tell what one takes: some may still be under way when it ends"""
NUM_CHECKED = 4
"""steps that a rest between drafts is to have measured: in the first ones the host still does what drafts left it, and
where it is the slower one they take half as long again as others"""
NUM_HELD = 31
"""newest steps whose seconds count"""


class Rest:
    """Steps after a decision in which the same requests go on, one token each."""

    def __init__(
        self, batch: BatchView, lengths: dict[str, int], num_left: int, is_one: bool, num_untold: int = 0
    ) -> None:
        """With `is_one` all steps are told in one outcome, `num_untold` further ones with them."""
        self.directive = Directive(0, lengths)
        """of every step that is not measured: 0 for everybody, as decided"""
        self.scheduled = dict.fromkeys(lengths, 1)
        """tokens of each request in any of these steps"""
        self.num_steps = 0
        """that were scheduled"""
        self.begun_at = 0.0
        """when the first of them was"""
        self.seconds: deque[float] = deque(maxlen=NUM_HELD)
        """that those took that were measured"""
        self._batch = batch
        self._num_left = num_left
        self._is_one, self._num_untold = is_one, num_untold

    def covers(self, scheduler_output: Any) -> bool:
        """Whether the step just scheduled is another one."""
        return (
            self._num_left > 0
            and scheduler_output.num_scheduled_tokens == self.scheduled
            and not scheduler_output.scheduled_spec_decode_tokens
            and not scheduler_output.scheduled_new_reqs
        )

    def take_step(self) -> bool:
        """Whether it is to be measured on the device."""
        self._num_left -= 1
        self.num_steps += 1
        return self.num_steps <= NUM_TIMED or self.num_steps % STEPS_PER_TIMED <= 1

    def _step_s(self) -> float:
        """What a step took. Of few the fastest: they are slow by accident, and because the policy thought of them. 0:
        too few of its steps are over."""
        if len(self.seconds) < min(self.num_steps, LEAST_MEASURED):
            return 0.0
        return min(self.seconds) if len(self.seconds) <= NUM_TIMED else statistics.median_low(self.seconds)

    def outcomes(self) -> list[Outcome]:
        batch, num = self._batch, self.num_steps
        nothing = np.zeros(batch.slots.size, np.int64)
        outcome = Outcome(
            slots=batch.slots,
            drafted=nothing,
            accepted=nothing,
            klds=np.empty(0),
            temperatures=batch.temperatures,
            verify_s=self._step_s(),
            num_decoding=batch.slots.size,
            num_steps=num + self._num_untold if self._is_one else 1,
        )
        return [outcome] if self._is_one else [outcome] * num
