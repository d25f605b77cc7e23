"""What the draft has not read of each request, and how it catches up.

While nobody drafts the draft is not run at all, so its KV cache falls behind. Before a request drafts again the draft
reads what it missed: within a budget of tokens for each step, the shortest backlogs first. Whoever has not caught up
waits. Knows requests by name; knows nothing of vLLM.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from dsde.integrations.vllm.messages import CatchUp


class Tokens(Protocol):
    """What is asked of a request of vLLM."""

    @property
    def all_token_ids(self) -> Sequence[int]: ...
    @property
    def num_tokens(self) -> int: ...


class Backlog:
    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.has_skipped = False
        """whether there may be KV blocks without the draft's half, for others to find in the prefix cache"""
        self._firsts: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._firsts)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._firsts

    def skip(self, request_id: str, first: int) -> None:
        """The draft does not read this request from `first` on."""
        self.has_skipped = True
        self._firsts[request_id] = min(first, self._firsts.get(request_id, first))

    def num_missed(self, request_id: str, end: int) -> int:
        """Tokens before `end` that the draft has not read of this request."""
        return max(end - self._firsts.get(request_id, end), 0)

    def forget(self, request_id: str) -> None:
        self._firsts.pop(request_id, None)

    def catch_up(self, wanting: dict[str, tuple[Tokens, int]]) -> tuple[list[CatchUp], set[str]]:
        """What the draft reads before this step's drafting, and who cannot draft yet.

        `wanting` are those who would draft, each with the position of the first token that the step itself reads.
        """
        behind = sorted((end - self._firsts[name], name) for name, (_, end) in wanting.items() if name in self._firsts)
        pieces: list[CatchUp] = []
        waiting: set[str] = set()
        left = self.budget
        for _, name in behind:
            request, end = wanting[name]
            # Two at least, for vLLM's draft takes the last one by another way; to read one again does no harm.
            first = max(min(self._firsts[name], end - 2), 0)
            num = min(end - first, left)
            if request.num_tokens < end or end < 2 or num < 2:
                waiting.add(name)  # not all of its tokens are known yet, or the budget is spent
                continue
            pieces.append(CatchUp(name, first, list(request.all_token_ids[first : first + num])))
            left -= num
            if first + num == end:
                del self._firsts[name]
            else:
                self._firsts[name] = first + num
                waiting.add(name)
        return pieces, waiting
