"""No speculation. The baseline of every comparison; knows and learns nothing."""

from __future__ import annotations

import numpy as np

from dsde.policies.base import FOREVER, BatchView, Plan, Policy


class Off(Policy):
    """Nobody drafts: plain decoding of the target."""

    def plan(self, batch: BatchView) -> Plan:
        num_sequences = batch.slots.size
        return Plan(
            lengths=np.zeros(num_sequences, np.int64),
            predicted=np.zeros(num_sequences),
            votes=np.zeros(num_sequences, np.bool_),
            num_resting=FOREVER,
        )
