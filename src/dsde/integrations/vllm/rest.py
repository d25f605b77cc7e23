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

LEAST_REST = 32
"""steps of a rest that a policy announces: to think of the next takes as long as half of a step of a small model"""
LONGEST_REST = 128
"""steps after which the policy is asked again, even if it wants nothing"""
NUM_TIMED = 4
"""first steps of a rest that are measured on the device; it may end soon"""
STEPS_PER_TIMED = 32
"""of those after them, of which one is: together with the one before, whose end is its beginning"""
LEAST_MEASURED = 2
"""steps of a longer rest that tell what one takes: some may still be under way when it ends"""
PROMPT_STEPS_PER_TIMED = 8
"""likewise of those that read prompts, of which there are fewer"""
NUM_CHECKED = 4
"""steps that a rest between drafts is to have measured: in the first ones the host still does what drafts left it, and
where it is the slower one they take half as long again as others"""
MOST_CHANGED = 0.25
"""share of its requests, that may have ended or come since it began: then the policy is asked again"""
NUM_HELD = 31
"""newest steps whose seconds count"""


class Rest:
    """Steps after a decision in which nobody drafts: the same requests go on, one token each, but for few that end, or
    come and have their prompts read."""

    def __init__(
        self,
        batch: BatchView,
        lengths: dict[str, int],
        num_left: int,
        is_one: bool,
        num_untold: int = 0,
        is_open: bool = False,
    ) -> None:
        """With `is_one` all steps are told in one outcome, `num_untold` further ones with them. With `is_open` few
        requests may end or come meanwhile."""
        self.directive = Directive(0, lengths)
        """of every step that is not measured: 0 for everybody, as decided"""
        self.scheduled = dict.fromkeys(lengths, 1)
        """tokens of each request in the newest of these steps"""
        self.retired: dict[int, int] = {}
        """slots of requests that have ended since it began, and of how many steps each was"""
        self.num_steps = 0
        """that were scheduled"""
        self.num_lengths = 0
        """of 0, that were chosen in them, one for every request"""
        self.begun_at = 0.0
        """when the first of them was"""
        self.seconds: deque[float] = deque(maxlen=NUM_HELD)
        """that those took that were measured and read no prompts"""
        self.prompt_steps: list[tuple[int, float]] = []
        """of the others: tokens of prompts, and seconds, 0 where it was not measured, or is not over"""
        self._batch = batch
        self._num_left = num_left
        self._num_changed = 0
        self.is_plain = True
        """whether the newest step read no prompts"""
        self._is_one, self._num_untold, self._is_open = is_one, num_untold, is_open

    @property
    def has_changed(self) -> bool:
        """Whether others are in it than when it began."""
        return self._num_changed > 0

    def covers(self, scheduler_output: Any) -> bool:
        """Whether the step just scheduled is another one, of the same requests as the one before."""
        return (
            self._num_left > 0
            and self.is_plain
            and scheduler_output.num_scheduled_tokens == self.scheduled
            and not scheduler_output.scheduled_spec_decode_tokens
            and not scheduler_output.scheduled_new_reqs
        )

    def admits(self, scheduler_output: Any) -> bool:
        """Whether it is another one although they are not the same; if so, they count from now on."""
        scheduled = scheduler_output.num_scheduled_tokens
        if not self._is_open or self._num_left <= 0 or scheduler_output.scheduled_spec_decode_tokens:
            return False
        new = {one.req_id for one in scheduler_output.scheduled_new_reqs}  # a name may be another request's by now
        num_changed = self._num_changed + len((scheduled.keys() ^ self.scheduled.keys()) | new)
        if num_changed > MOST_CHANGED * self._batch.slots.size:
            return False
        self._num_changed, self.scheduled = num_changed, dict(scheduled)
        num_prompt_tokens = sum(number for number in scheduled.values() if number > 1)
        self.is_plain = not num_prompt_tokens
        if num_prompt_tokens:
            self.prompt_steps.append((num_prompt_tokens, 0.0))
        return True

    def take_step(self, now: float) -> None:
        """Another one was scheduled."""
        if not self.num_steps:
            self.begun_at = now
        self._num_left -= 1
        self.num_steps += 1
        self.num_lengths += len(self.scheduled)

    @property
    def is_timed(self) -> bool:
        """Whether the newest step is to be measured on the device."""
        if not self.is_plain:
            num = len(self.prompt_steps)
            return self._batch.favours_one_length and (num <= NUM_TIMED or num % PROMPT_STEPS_PER_TIMED == 1)
        return self.num_steps <= NUM_TIMED or self.num_steps % STEPS_PER_TIMED <= 1

    def note(self, seconds: float, place: int | None) -> None:
        """One of its steps took so long, the one at that place of those that read prompts, or another."""
        if place is None:
            self.seconds.append(seconds)
        else:
            self.prompt_steps[place] = self.prompt_steps[place][0], seconds

    @property
    def step_s(self) -> float:
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
            verify_s=self.step_s,
            num_decoding=batch.slots.size,
            num_steps=num + self._num_untold if self._is_one else 1,
            prompt_steps=self.prompt_steps if batch.favours_one_length else [],
        )
        if self._is_one and self.retired:
            counts = [self.retired.get(slot, num) for slot in batch.slots.tolist()]
            outcome.num_emitted = np.array(counts, np.int64) + self._num_untold
        return [outcome] if self._is_one else [outcome] * num
