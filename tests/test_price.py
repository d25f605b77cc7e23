"""Prices by which tokens are decided one by one: where looking tells nothing, what was chosen for all comes out."""

from __future__ import annotations

import numpy as np
import pytest

from dsde.core.stops import StopByWorth
from dsde.policies.cost import CostModel
from dsde.policies.price import find_prices


class Steps(CostModel):
    """A verification that jumps at some sizes, as where another kernel takes over, and is flat between them."""

    def __init__(self, jumps: dict[int, float], slope_s: float, draft_s: float) -> None:
        super().__init__()
        self._jumps, self._slope_s, self._pass_s = jumps, slope_s, draft_s

    def verify_s(self, tokens: object) -> np.ndarray:
        sizes = np.asarray(tokens, np.float64)
        return 4e-3 + self._slope_s * sizes + sum(height * (sizes > at) for at, height in self._jumps.items())

    def draft_s(self, batch_sizes: object) -> np.ndarray:
        return self._pass_s + 4e-6 * np.asarray(batch_sizes, np.float64)

    def is_measured(self, tokens: float) -> bool:
        return True


def drafted(stop: StopByWorth, num: int, longest: int) -> list[int]:
    """Lengths if every position looks as expected."""
    lengths, active, survivals = np.zeros(num, np.int64), np.arange(num), np.ones(num)
    for depth in range(longest):
        survivals[active] = stop.survivals(active, survivals[active], np.zeros((active.size, 3)))
        active = active[stop.keeps(depth, active, survivals[active])]
        lengths[active] += 1
        active = active[stop.goes_on(depth, active, survivals[active], np.full(active.size, depth + 1 < longest))]
    return lengths.tolist()


def best_lengths(cost: CostModel, outlooks: np.ndarray, longest: int) -> tuple[np.ndarray, float]:
    """Of all tokens likelier than some level, in so many passes: the best, and the rate."""
    num, depths = outlooks.size, np.arange(longest)
    chances = outlooks[:, None] ** (depths + 1)
    levels = np.unique(chances)
    likely = (chances >= levels[:, None, None]).sum(axis=2)
    best = np.zeros(num, np.int64), num / float(cost.verify_s(num))
    for num_passes in depths + 1:
        lengths = np.minimum(likely, num_passes)
        is_drafted = lengths[:, :, None] > depths  # of every level and sequence
        counts = is_drafted.sum(axis=1)
        seconds = np.where(counts > 0, cost.draft_s(counts), 0.0).sum(axis=1) + cost.verify_s(num + counts.sum(axis=1))
        rates = (num + (chances * is_drafted).sum(axis=(1, 2))) / seconds
        most = int(rates.argmax())
        best = max(best, (lengths[most], float(rates[most])), key=lambda one: one[1])
    return best


def stop_at(
    cost: CostModel, outlooks: np.ndarray, lengths: np.ndarray, rate: float, rooms: np.ndarray | None = None
) -> StopByWorth:
    rooms = np.full(outlooks.size, 100) if rooms is None else rooms
    prices = find_prices(cost, rate, outlooks, lengths, rooms, outlooks.size)
    assert 0 <= prices.token_s <= prices.beyond_s
    return StopByWorth(
        weights=np.zeros(3),
        offsets=np.log(outlooks / (1 - outlooks)),
        outlooks=outlooks,
        keep_above=rate * prices.token_s,
        go_on_above=rate * (prices.token_s + prices.each_s),
        pass_above=rate * prices.pass_s,
        usual=lengths,
        dearer=rate * (prices.beyond_s - prices.token_s),
    )


@pytest.mark.parametrize("num", [1, 8, 64])
@pytest.mark.parametrize("seed", range(12))
def test_alike_sequences_get_what_was_chosen_whatever_jumps(num: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    jumps = dict(zip((num * rng.integers(1, 9, 3)).tolist(), (rng.random(3) * 3e-3).tolist(), strict=True))
    cost = Steps(jumps, slope_s=5e-6, draft_s=0.8e-3)
    outlooks = np.full(num, rng.uniform(0.7, 0.95))
    lengths, rate = best_lengths(cost, outlooks, 12)
    assert num > 8 or lengths.any()
    if lengths.any():
        assert drafted(stop_at(cost, outlooks, lengths, rate), num, 2 * int(lengths.max()) + 2) == lengths.tolist()


@pytest.mark.parametrize("seed", range(12))
def test_of_unlike_sequences_nearly_as_many_tokens_are_drafted(seed: int) -> None:
    rng = np.random.default_rng(seed)
    cost = Steps({128: 0.3e-3, 320: 6e-3}, slope_s=4e-6, draft_s=0.4e-3)
    outlooks = np.where(rng.random(64) < 0.5, 0.95, 0.4) + rng.normal(0, 0.01, 64)
    lengths, rate = best_lengths(cost, outlooks, 12)
    assert len(set(lengths.tolist())) > 1
    found = drafted(stop_at(cost, outlooks, lengths, rate), 64, 2 * int(lengths.max()) + 2)
    assert sum(found) == pytest.approx(lengths.sum(), rel=0.1)


def test_those_at_their_end_do_not_make_tokens_dearer_for_others() -> None:
    """One price for all comes near what was chosen for unlike sequences, not always; but no less often for these."""
    cost, num_near = Steps({192: 3e-3}, slope_s=4e-6, draft_s=0.4e-3), 0
    for seed in range(12):
        rng = np.random.default_rng(seed)
        outlooks = rng.uniform(0.4, 0.95, 64)
        lengths, rate = best_lengths(cost, outlooks, 12)
        rooms = np.where(rng.random(64) < 0.1, 1, 100)
        lengths = np.minimum(lengths, rooms)
        found = drafted(stop_at(cost, outlooks, lengths, rate, rooms), 64, 2 * int(lengths.max()) + 2)
        num_near += abs(np.minimum(found, rooms).sum() - lengths.sum()) <= 0.1 * lengths.sum()
    assert num_near >= 9


def test_a_sure_draft_may_go_beyond_a_jump_if_it_pays_for_it() -> None:
    """Not because the tokens before it were cheap, and not never."""
    cost = Steps({4: 0.8e-3}, slope_s=5e-6, draft_s=0.4e-3)
    outlooks = np.array([0.8])
    lengths, rate = best_lengths(cost, outlooks, 12)
    assert lengths.tolist() == [3]
    stop = stop_at(cost, outlooks, lengths, rate)
    here = np.array([0])
    assert not stop.goes_on(2, here, np.array([0.55]), np.array([True]))[0]
    assert stop.goes_on(2, here, np.array([0.99]), np.array([True]))[0]
