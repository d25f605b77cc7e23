"""Drafts that are longer than any before: when, and what for."""

from __future__ import annotations

import itertools

import pytest

from dsde.policies import Auto, make_policy
from dsde.policies.stretch import FIRST, LAST, LONGER, NUM_TRIES, Stretch
from dsde.simulation import make_costs, make_stream, simulate

BUMP = """{
    "machine": "one on which two tokens of four sequences cost more than three or four",
    "draft": [[1, 0.00079], [4, 0.000835]],
    "verify": [[4, 4, 0.00465], [4, 8, 0.00555], [4, 12, 0.00486], [4, 16, 0.00487], [4, 20, 0.00495], [4, 28, 0.0054]],
    "catch_up": [[16, 0.001], [1024, 0.01]]
}"""


def test_it_is_tried_ever_more_rarely_for_every_size_of_batch() -> None:
    stretch, tries = Stretch(), []
    for number in range(20_000):
        if stretch.is_due(8):
            tries.append(number)
            stretch.take(8)
        else:
            stretch.count(8)
    assert tries[:NUM_TRIES] == [FIRST, FIRST + 1]
    gaps = [after - before for before, after in itertools.pairwise(tries) if after - before > 1]
    assert gaps[:2] == [LONGER * FIRST + 1, LONGER**2 * FIRST + 1]
    assert max(gaps) == LAST + 1
    assert not stretch.is_due(64)


@pytest.mark.parametrize("is_stretched", [True, False])
def test_nobody_stays_before_a_bump(is_stretched: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What so many tokens cost does not tell what more of them would."""
    costs, requests = make_costs(BUMP), make_stream("iid:0.6").draw(24, 256, seed=6)
    best = max(simulate(make_policy(f"static:{length}"), requests, costs, 4).tokens_per_s for length in (1, 2, 3, 4))
    if not is_stretched:
        monkeypatch.setattr(Stretch, "is_due", lambda *_: False)
    share = simulate(Auto(), requests, costs, 4).tokens_per_s / best
    assert share > 0.98 if is_stretched else share < 0.96, "else this test would show nothing"
