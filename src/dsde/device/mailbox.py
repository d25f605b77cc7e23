"""Page-locked words by which a device tells the host something while it works: no copy, no event, no end to wait for.

A word is its letter's number in the upper half and what it says in the lower. Words are written whole, but in no
particular order, so a letter is there when every one of its words bears its number. There is room for two letters: one
may be written while the one before it has not been read. Knows nothing of what they say.
"""

from __future__ import annotations

import select
from itertools import count

import numpy as np
import torch
from numpy.typing import NDArray

IntArray = NDArray[np.int64]

_NUM_NUMBERS = 1 << 31
_LOOKS_PER_CHECK = 1000
"""between two questions whether the device is still at work; a few milliseconds"""


class Mailbox:
    def __init__(self, size: int, device: torch.device) -> None:
        self.device = device
        self.words = torch.zeros((2, size), dtype=torch.int64, pin_memory=device.type == "cuda")
        """for the kernel that writes: letters of even numbers, and of odd ones"""
        self._words: IntArray = self.words.numpy()
        self._number = 0

    def next_number(self) -> int:
        """For another letter."""
        self._number = (self._number + 1) % _NUM_NUMBERS
        return self._number

    def has_come(self, number: int, num_words: int) -> bool:
        return bool((self._words[number % 2, :num_words] >> 32 == number).all())

    def peek(self, number: int, num_words: int) -> IntArray | None:
        """What a letter says, if it has come and no other has been written over it."""
        words = self._words[number % 2, :num_words].copy()
        return words & 0xFFFFFFFF if bool((words >> 32 == number).all()) else None

    def wait(self, number: int, num_words: int) -> IntArray:
        """What a letter says."""
        for num_looks in count(1):
            if self.has_come(number, num_words):
                break
            # Looked at once more: it may have come just before the device was done.
            if num_looks % _LOOKS_PER_CHECK == 0 and self._is_done() and not self.has_come(number, num_words):
                raise RuntimeError("The device is done, and has not answered.")
            # Gives other threads a chance, and comes back a hundred times sooner than a sleep of no length.
            select.select((), (), (), 0)
        return self._words[number % 2, :num_words] & 0xFFFFFFFF

    def _is_done(self) -> bool:
        """Whether the device has nothing more to do; one that has failed says so when asked."""
        return self.device.type != "cuda" or torch.cuda.current_stream(self.device).query()
