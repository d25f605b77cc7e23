"""Has a stop rule applied on the device while it drafts, and hears what it decided.

Knows nothing of passes: a pass that decides for itself calls `decide` at its end.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from dsde.device.mailbox import Mailbox
from dsde.device.staging import Layout, Sheet
from dsde.drafting.draft_store import GrowingDraft, IntArray
from dsde.drafting.kernels import decide
from dsde.drafting.ruling import Ruling, ruling_sizes
from dsde.models.passes import power_of_2


class Call(NamedTuple):
    """Decisions that are on their way."""

    ruling: Ruling
    number: int
    """of the letter they come in"""
    num_tokens: int


@dataclass(slots=True)
class _Inputs:
    """Of a decision that is not part of a pass."""

    sheet: Sheet
    words: torch.Tensor
    arrays: dict[str, torch.Tensor]


class Referee:
    def __init__(self, max_num_seqs: int, device: torch.device) -> None:
        self.mailbox = Mailbox(max_num_seqs, device)
        self._standings = torch.zeros((max_num_seqs, 2), device=device)
        """what the device remembers of a step's drafts from pass to pass"""
        self._inputs: dict[int, _Inputs] = {}

    def write(
        self, ruling: Ruling, sheet: Sheet, draft: GrowingDraft, members: IntArray, depth: int, places: IntArray
    ) -> Call:
        """What must be in the sheet for a decision on these members' tokens, which lie at `places` in the store."""
        number = self.mailbox.next_number()
        ruling.write(sheet, members, places, draft.lengths[members] > depth + 1, depth, number)
        return Call(ruling, number, len(members))

    def decide(self, arrays: dict[str, torch.Tensor], signals: torch.Tensor) -> None:
        decide(arrays, signals, self._standings, self.mailbox.words)

    def prepare(self, ruling: Ruling, draft: GrowingDraft, signals: torch.Tensor) -> tuple[Call, Callable[[], None]]:
        """A decision on tokens of passes that did not know of the rule: first ones, drawn before the step was planned.
        It is made when what is returned beside it is called."""
        size = power_of_2(len(draft.members))
        inputs = self._inputs.get(size)
        if inputs is None:
            layout = Layout(ruling_sizes(size))
            words = torch.empty(layout.num_words, dtype=torch.int32, device=signals.device)
            sheet = Sheet.blank(layout, pinned=signals.device.type == "cuda")
            inputs = self._inputs[size] = _Inputs(sheet, words, layout.views(words))
        places = draft.rows[draft.members, draft.depth]
        call = self.write(ruling, inputs.sheet, draft, draft.members, draft.depth, places)

        def decide_now() -> None:
            inputs.words.copy_(inputs.sheet.words, non_blocking=True)
            self.decide(inputs.arrays, signals)

        return call, decide_now

    def has_decided(self, call: Call) -> bool:
        return self.mailbox.has_come(call.number, call.num_tokens)

    def wait(self, call: Call) -> IntArray:
        """[tokens] a `Decision` on each."""
        return self.mailbox.wait(call.number, call.num_tokens)
