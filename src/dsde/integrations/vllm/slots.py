"""Small integers for requests, which policies know instead of names: one for as long as the request lives."""

from __future__ import annotations

import heapq
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray


class Slots:
    def __init__(self) -> None:
        self._slots: dict[str, int] = {}
        self._free: list[int] = []

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._slots

    def of(self, request_id: str) -> int:
        slot = self._slots.get(request_id)
        if slot is None:
            slot = heapq.heappop(self._free) if self._free else len(self._slots)
            self._slots[request_id] = slot
        return slot

    def release(self, request_ids: Iterable[str]) -> NDArray[np.int64]:
        """The slots of these requests, free from now on; who has none is passed over."""
        freed = [slot for name in request_ids if (slot := self._slots.pop(name, None)) is not None]
        for slot in freed:
            heapq.heappush(self._free, slot)
        return np.array(freed, np.int64)
