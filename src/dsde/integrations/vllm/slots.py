"""Small integers for requests, which policies know instead of names: one for as long as the request lives."""

from __future__ import annotations

import heapq
from collections.abc import Iterable


class Slots:
    def __init__(self) -> None:
        self._slots: dict[str, int] = {}
        self._free: list[int] = []
        self._num_made = 0

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._slots

    def of(self, request_id: str) -> int:
        slot = self._slots.get(request_id)
        if slot is None:
            if not self._free:
                self._free.append(self._num_made)
                self._num_made += 1
            slot = self._slots[request_id] = heapq.heappop(self._free)
        return slot

    def retire(self, request_ids: Iterable[str]) -> list[int]:
        """The slots of these requests, which have none from now on; to be freed when nothing is told of them any more.
        Who has none is passed over."""
        return [slot for name in request_ids if (slot := self._slots.pop(name, None)) is not None]

    def free(self, slots: Iterable[int]) -> None:
        """They may be given to others."""
        for slot in slots:
            heapq.heappush(self._free, slot)
