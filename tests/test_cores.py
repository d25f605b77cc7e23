"""Which cores a benchmark of a GPU keeps to."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
import cores


@pytest.fixture
def other() -> Iterator[threading.Thread]:
    """Another thread of this process."""
    is_over = threading.Event()
    thread = threading.Thread(target=is_over.wait)
    thread.start()
    yield thread
    is_over.set()
    thread.join()


@pytest.mark.parametrize(
    ("num_cores", "num_per_core", "expected"), [(16, 1, {12, 13, 14}), (16, 2, {8, 10, 12}), (3, 1, None)]
)
def test_the_serving_thread_has_a_core_of_its_own(
    num_cores: int,
    num_per_core: int,
    expected: set[int] | None,
    other: threading.Thread,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The last of them, and never two threads of one core of the machine; where there are few nobody is moved."""
    moved: dict[int, set[int]] = {}
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(num_cores)))
    monkeypatch.setattr(os, "sched_setaffinity", moved.__setitem__)
    monkeypatch.setattr(cores, "is_first_thread", lambda core: core % num_per_core == 0)
    for _ in range(2):
        kept = cores.keep_to_cores()
    assert len(kept) == (cores.NUM_CORES if expected else 0)
    assert moved.get(other.native_id) == expected
    assert moved.get(os.getpid()) == (expected and {max(expected) + num_per_core})


def test_threads_of_one_core_are_told_by_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    said = {0: "0,8\n", 8: "0,8\n", 1: "1-2\n", 2: "1-2\n", 3: "3\n"}
    monkeypatch.setattr(Path, "read_text", lambda path: said[int(path.parts[-3].removeprefix("cpu"))])
    assert [core for core in said if cores.is_first_thread(core)] == [0, 1, 3]
