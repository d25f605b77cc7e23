"""When what drafts are compared with is measured again."""

from __future__ import annotations

from dsde.policies.recheck import FIRST, LAST, Recheck


def waits(recheck: Recheck, num_sequences: int, num: int, is_measured: bool = True) -> list[int]:
    """Drafts before each of so many times."""
    found = []
    for _ in range(num):
        count = 0
        while not recheck.is_due(num_sequences):
            recheck.count(num_sequences)
            count += 1
        recheck.begin(num_sequences)
        if is_measured:
            recheck.end(num_sequences)
        found.append(count)
    return found


def test_ever_more_rarely_and_for_every_size_by_itself() -> None:
    recheck = Recheck()
    assert waits(recheck, 8, 7) == [FIRST, 2 * FIRST, 4 * FIRST, 8 * FIRST, LAST, LAST, LAST]
    assert waits(recheck, 5, 1) == [LAST], "of five to eight it is the same"
    assert waits(recheck, 9, 1) == waits(recheck, 1, 1) == [FIRST]


def test_what_was_not_measured_is_tried_again() -> None:
    """But not for ever: some engines measure nothing."""
    assert waits(Recheck(), 8, 7, is_measured=False) == [FIRST, *(FIRST * n for n in (1, 2, 4, 8)), LAST, LAST]


def test_what_is_measured_anyway_need_not_be() -> None:
    recheck = Recheck()
    for _ in range(FIRST - 1):
        recheck.count(4)
    recheck.begin(4)  # a size that is new is measured twice, and that is no reason to wait longer
    recheck.end(4)
    recheck.end(4)
    assert waits(recheck, 4, 2) == [FIRST, 2 * FIRST]
