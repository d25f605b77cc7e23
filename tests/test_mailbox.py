"""Words by which a device tells the host something: whole letters only, and silence is an error."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from dsde.device import mailbox
from dsde.device.mailbox import Mailbox

DEVICE = torch.device("cpu")


def write(box: Mailbox, place: int, number: int, code: int) -> None:
    box.words[number % 2, place] = (number << 32) | code


def test_a_letter_has_come_when_all_of_it_has() -> None:
    box = Mailbox(4, DEVICE)
    for _ in range(3):
        number = box.next_number()
        for place in (2, 0, 1):
            assert not box.has_come(number, 3)
            write(box, place, number, place)
        assert box.has_come(number, 3)
        assert box.wait(number, 3).tolist() == [0, 1, 2]
        assert not box.has_come(number, 4)


def test_the_host_waits_while_another_thread_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which it lets run."""
    monkeypatch.setattr(Mailbox, "_is_done", lambda _: False)
    box = Mailbox(2, DEVICE)
    number = box.next_number()

    def answer() -> None:
        for place in (1, 0):
            time.sleep(0.01)
            write(box, place, number, 7 + place)

    thread = threading.Thread(target=answer)
    thread.start()
    assert box.wait(number, 2).tolist() == [7, 8]
    thread.join()


def test_numbers_begin_anew() -> None:
    box = Mailbox(1, DEVICE)
    box._number = mailbox._NUM_NUMBERS - 1
    write(box, 0, box._number, 2)
    number = box.next_number()
    assert not box.has_come(number + 1, 1)
    write(box, 0, number, 1)
    assert box.wait(number, 1).tolist() == [1]


def test_an_answer_that_came_just_before_the_device_was_done(monkeypatch: pytest.MonkeyPatch) -> None:
    box = Mailbox(1, DEVICE)
    number = box.next_number()

    def finish(_: Mailbox) -> bool:
        write(box, 0, number, 5)
        return True

    monkeypatch.setattr(Mailbox, "_is_done", finish)
    assert box.wait(number, 1).tolist() == [5]


def test_a_device_that_is_done_and_silent() -> None:
    box = Mailbox(1, DEVICE)
    with pytest.raises(RuntimeError, match="has not answered"):
        box.wait(box.next_number(), 1)


def test_a_letter_is_there_to_be_looked_at_until_another_is_written_over_it() -> None:
    box = Mailbox(4, DEVICE)
    first = box.next_number()
    assert box.peek(first, 2) is None
    write(box, 0, first, 7)
    assert box.peek(first, 2) is None
    write(box, 1, first, 9)
    found = box.peek(first, 2)
    assert found is not None
    assert found.tolist() == [7, 9]
    second, third = box.next_number(), box.next_number()
    write(box, 0, second, 1)
    assert box.peek(first, 2) is not None
    write(box, 1, third, 1)
    assert box.peek(first, 2) is None
    assert found.tolist() == [7, 9]
