"""Programs: on a CUDA device as graphs with conditional nodes, elsewhere played."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from dsde.device.program import Program, Work, can_run

HAS_CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_CUDA else "cpu")
pytestmark = [pytest.mark.gpu] if HAS_CUDA else []


class Played:
    def __init__(self, do: Callable[[], None]) -> None:
        self.replay = do

    def raw_cuda_graph(self) -> int:
        raise AssertionError("there are no graphs here")


def work_of(do: Callable[[], None]) -> Work:
    if not HAS_CUDA:
        return Played(do)
    do()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
        graph.capture_begin()
        do()
        graph.capture_end()
    torch.cuda.synchronize()
    return graph  # type: ignore[return-value]


def word(value: int) -> torch.Tensor:
    return torch.tensor([value], dtype=torch.int32, device=DEVICE)


def test_work_is_done_as_long_as_a_word_says_so() -> None:
    assert can_run(DEVICE)
    left, count, after = word(0), word(0), word(0)

    def go_on() -> None:
        left.sub_(1)
        count.add_(1)

    program = Program(DEVICE)
    program.as_long_as(left, work_of(go_on))
    program.then(work_of(lambda: after.copy_(count)))
    program.finish()
    for times in (3, 0, 1, 20):
        left.fill_(times)
        count.zero_()
        program.run()
        assert (int(left), int(count), int(after)) == (0, times, times)


def test_one_of_several_is_done_and_may_be_chosen_by_what_is_done_before() -> None:
    choice, found = word(0), word(0)
    fits = torch.zeros(3, dtype=torch.int32, device=DEVICE)
    numbers = torch.arange(3, device=DEVICE)
    program = Program(DEVICE)
    program.then(work_of(lambda: fits.copy_(numbers == choice)))
    program.one_of([(fits[i : i + 1], work_of(lambda i=i: found.add_(10**i))) for i in range(3)])  # type: ignore[misc]
    program.finish()
    for chosen, expected in ((0, 1), (2, 100), (1, 10), (7, 0)):
        choice.fill_(chosen)
        found.zero_()
        program.run()
        assert int(found) == expected
