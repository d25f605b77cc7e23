"""Has a stop rule applied on the device while it drafts, and hears what it decided.

Knows nothing of passes: a pass that decides for itself calls `decide` at its end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from dsde.device.mailbox import Mailbox
from dsde.device.staging import Layout, Sheet
from dsde.drafting.draft_store import GrowingDraft, IntArray
from dsde.drafting.kernels import decide
from dsde.drafting.ruling import Arrays, Ruling, ruling_sizes
from dsde.drafting.solo_kernels import SoloState
from dsde.models.buckets import power_of_2


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

    def announce(self, ruling: Ruling, num_tokens: int) -> Call:
        """Decisions on so many tokens will be made; in the order in which they are announced."""
        return Call(ruling, self.mailbox.next_number(), num_tokens)

    def write(
        self, call: Call, host: Arrays, draft: GrowingDraft, members: IntArray, depth: int, places: IntArray
    ) -> None:
        """What the device must know for decisions on these members' tokens, which lie at `places` in the store."""
        call.ruling.write(host, members, places, draft.lengths[members] > depth + 1, depth, call.number)

    def write_first(self, call: Call, host: Arrays, draft: GrowingDraft) -> None:
        """The same for the newest tokens of passes that did not know of the rule: first ones, drawn before the step was
        planned."""
        self.write(call, host, draft, draft.members, draft.depth, draft.rows[draft.members, draft.depth])

    def decide(self, arrays: dict[str, torch.Tensor], signals: torch.Tensor, solo: SoloState | None = None) -> None:
        decide(arrays, signals, self._standings, self.mailbox.words, solo)

    def decide_now(self, call: Call, draft: GrowingDraft, signals: torch.Tensor) -> None:
        """On first tokens, where no pass follows that would do it."""
        size = power_of_2(len(draft.members))
        inputs = self._inputs.get(size)
        if inputs is None:
            layout = Layout(ruling_sizes(size))
            words = torch.empty(layout.num_words, dtype=torch.int32, device=signals.device)
            sheet = Sheet.blank(layout, pinned=signals.device.type == "cuda")
            inputs = self._inputs[size] = _Inputs(sheet, words, layout.views(words))
        self.write_first(call, inputs.sheet.arrays, draft)
        inputs.words.copy_(inputs.sheet.words, non_blocking=True)
        self.decide(inputs.arrays, signals)

    def has_decided(self, call: Call) -> bool:
        return self.mailbox.has_come(call.number, call.num_tokens)

    def peek(self, call: Call) -> IntArray | None:
        """[tokens] a `Decision` on each, if it is there and has not been forgotten."""
        return self.mailbox.peek(call.number, call.num_tokens)

    def wait(self, call: Call) -> IntArray:
        """[tokens] a `Decision` on each."""
        return self.mailbox.wait(call.number, call.num_tokens)
