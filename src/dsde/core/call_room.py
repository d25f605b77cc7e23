"""Room for deep calls: a loop whose every turn calls far down is called with it.

Python keeps the frames of a thread in pieces of 16 KiB. A call that finds no room in the newest piece has the system
map another one, which is given back when it returns: where a hot call happens to lie at such an edge this is done over
and over, and each time takes longer than many calls. How deep one is called decides whether it happens, and one wrapper
more may be enough. But a frame that is larger than a piece gets a larger one, and whatever it calls lies in there, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

NUM_SLOTS = 33_000
"""of a frame, 8 bytes each: its piece is 512 KiB then, of which it takes a little more than half untouched"""


def call_with_room(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """For what takes its time: mapping the memory is as slow as it ever was, but done once."""
    return function(*args, **kwargs)


call_with_room.__code__ = call_with_room.__code__.replace(co_stacksize=NUM_SLOTS)
