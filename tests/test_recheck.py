"""When what drafts are compared with is measured again."""

from __future__ import annotations

from dsde.policies.recheck import FIRST, LAST, LONGER, Recheck


def waits(recheck: Recheck, num_sequences: int, *found: bool | None) -> list[int]:
    """Drafts before each time, of which this was found: as thought, otherwise, or nothing."""
    counts = []
    for is_as_thought in found:
        count = 0
        while not recheck.is_due(num_sequences):
            recheck.count(num_sequences)
            count += 1
        recheck.begin(num_sequences)
        if is_as_thought is not None:
            recheck.end(num_sequences, is_as_thought)
        counts.append(count)
    return counts


def test_ever_more_rarely_and_for_every_size_by_itself() -> None:
    recheck = Recheck()
    assert waits(recheck, 8, True, True, True, True, True) == [FIRST, LONGER * FIRST, 192, 768, LAST]
    assert waits(recheck, 5, True) == [LAST], "of five to eight it is the same"
    assert waits(recheck, 9, True) == waits(recheck, 1, True) == [FIRST]


def test_soon_again_if_it_is_otherwise_than_was_thought() -> None:
    assert waits(Recheck(), 8, False, False, True, False, True) == [FIRST, FIRST, FIRST, LONGER * FIRST, FIRST]


def test_what_was_not_measured_is_tried_again() -> None:
    """But not for ever: some engines measure nothing."""
    assert waits(Recheck(), 8, *[None] * 5) == [FIRST, FIRST, LONGER * FIRST, 192, 768]


def test_what_is_measured_anyway_need_not_be() -> None:
    recheck = Recheck()
    for _ in range(FIRST - 1):
        recheck.count(4)
    recheck.begin(4)  # a size that is new is measured twice, and that is no reason to wait longer
    recheck.end(4, True)
    recheck.end(4, True)
    assert waits(recheck, 4, True, True) == [FIRST, LONGER * FIRST]
