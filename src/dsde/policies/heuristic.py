"""The heuristic schedule of Hugging Face transformers' assisted generation: two more after a success, else one fewer.

Knows, of every sequence, whether its whole draft was accepted. Does not know how much of a rejected draft was accepted,
nor load or time, and never stops speculation. The original runs one request at a time and sets no upper limit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from dsde.policies.base import BatchView, FloatArray, IntArray, Outcome, Plan, Policy
from dsde.policies.limits import LONGEST, check_choice, check_whole
from dsde.policies.slots import SlotTable

Schedule = Literal["heuristic", "heuristic_transient"]
INCREASE = 2
DECREASE = 1
SHORTEST = 1


@dataclass
class _Sequences(SlotTable):
    num_assistant_tokens: IntArray
    """length wanted next; 0: the sequence has not begun"""
    acceptance_rate: FloatArray
    """of the draft verified last, NaN before"""


class Heuristic(Policy):
    """Lengths that creep up while everything is accepted, per sequence.

    `initial` is `num_assistant_tokens`: 5 in the releases that had this schedule by default, 20 since (transformers
    5.22). With the schedule "heuristic" a sequence begins at the length where the one that ended last had arrived; with
    "heuristic_transient" every sequence begins at `initial`.
    """

    def __init__(self, initial: int = 5, *, max: int = LONGEST, schedule: Schedule = "heuristic_transient") -> None:
        check_whole("initial", initial, SHORTEST, LONGEST)
        check_whole("max", max, SHORTEST, LONGEST)
        check_choice("schedule", schedule, get_args(Schedule))
        self.initial, self.max, self.schedule = initial, max, schedule
        self._first = min(initial, max)
        self._sequences = _Sequences(np.zeros(1, np.int64), np.full(1, np.nan))

    def plan(self, batch: BatchView) -> Plan:
        wanted = self._begun(batch.slots)
        return Plan.wanting(wanted, batch, acceptance_rate=self._sequences.acceptance_rate[batch.slots])

    def observe(self, outcome: Outcome) -> None:
        active = outcome.drafted > 0
        slots, drafted, accepted = outcome.slots[active], outcome.drafted[active], outcome.accepted[active]
        wanted = self._begun(slots)
        # A draft cut short by its room or by a stage says nothing of longer ones: else a length under a cap would grow
        # without ever having been tried, and raise the mean of the batch with it.
        longer = np.maximum(wanted, np.minimum(drafted + INCREASE, self.max))
        shorter = np.maximum(wanted - DECREASE, SHORTEST)
        self._sequences.num_assistant_tokens[slots] = np.where(accepted == drafted, longer, shorter)
        self._sequences.acceptance_rate[slots] = accepted / drafted

    def forget(self, slots: IntArray) -> None:
        if self.schedule == "heuristic":
            lengths = self._sequences.num_assistant_tokens
            arrived = lengths[slots[slots < lengths.size]]
            arrived = arrived[arrived > 0]
            if arrived.size:
                self._first = int(arrived[-1])
        self._sequences.reset(slots)

    def _begun(self, slots: IntArray) -> IntArray:
        """Lengths wanted of these sequences, from now on their own."""
        self._sequences.cover(slots)
        wanted = self._sequences.num_assistant_tokens[slots]
        wanted[wanted == 0] = self._first
        self._sequences.num_assistant_tokens[slots] = wanted
        return wanted
