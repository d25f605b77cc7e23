"""vLLM's Dynamic SD: a table, written by hand, from the batch size to one length for everybody.

Knows how many sequences decode. Learns nothing, and does not know how well drafts are accepted or what a step costs:
whoever wrote the table had measured that. The same table is vLLM's `num_speculative_tokens_per_batch_size`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from dsde.core.errors import InvalidInput
from dsde.policies.base import BatchView, Plan, Policy
from dsde.policies.limits import LONGEST, check_whole

LARGEST_BATCH = 1_000_000
EXAMPLE = "[[1,8,4],[9,64,2]]"


class BatchTable(Policy):
    """Rows `[lo, hi, k]`: from lo to hi sequences, both included, everybody drafts k tokens, 0 allowed.

    A batch size between two rows, or above the last one, gets the k of the row below it. `max` is vLLM's
    `num_speculative_tokens`, which bounds every k. The table may be given as JSON text.
    """

    def __init__(self, table: str | Sequence[Sequence[int]], *, max: int = LONGEST) -> None:
        check_whole("max", max, 0, LONGEST)
        self.max = max
        self.table = _checked(_parsed(table) if isinstance(table, str) else table)
        self._starts = np.array([lo for lo, _, _ in self.table])
        self._lengths = np.minimum([k for _, _, k in self.table], max)

    def plan(self, batch: BatchView) -> Plan:
        row = int(self._starts.searchsorted(batch.num_decoding, side="right")) - 1
        length = int(self._lengths[row]) if row >= 0 else 0
        return Plan.wanting(length, batch, num_decoding=batch.num_decoding)


def _parsed(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise InvalidInput(f"table must be rows of [lo, hi, k] as in {EXAMPLE}, not {text!r}") from None


def _checked(table: object) -> list[tuple[int, int, int]]:
    """The rows in order of batch size."""
    rows: list[tuple[int, int, int]] = []
    for row in table if isinstance(table, list | tuple) else []:
        if not isinstance(row, list | tuple) or len(row) != 3:
            raise InvalidInput(f"a row of the table must be [lo, hi, k] as in {EXAMPLE}, not {row!r}")
        lo, hi, k = row
        check_whole("lo of the table", lo, 1, LARGEST_BATCH)
        check_whole("hi of the table", hi, lo, LARGEST_BATCH)
        check_whole("k of the table", k, 0, LONGEST)
        rows.append((lo, hi, k))
    if not rows:
        raise InvalidInput(f"table must be rows of [lo, hi, k] as in {EXAMPLE}, not {table!r}")
    rows.sort()
    if rows[0][0] != 1:
        raise InvalidInput(f"the first row of the table must start at 1, not at {rows[0][0]}")
    for below, above in pairwise(rows):
        if above[0] <= below[1]:
            raise InvalidInput(f"rows of the table must not overlap, as {list(below)} and {list(above)} do")
    return rows
