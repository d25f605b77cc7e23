"""A verification budget: the best beginnings of all drafts, lossless, whatever is cut off."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from dsde import SamplingParams
from dsde.core.selection import VerifyBudget
from dsde.core.stops import Signal
from test_lossless_distribution import DRAFTS, LENGTH, TOO_UNLIKELY, enumerate_outputs, p_value, sample_outputs
from tiny import complete, make_engine, tiny_model


def test_the_best_sum_of_scores_of_all_ways_to_cut() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        lengths = rng.integers(0, 4, 4)
        confidences = rng.random((4, 3))
        budget = int(rng.integers(0, 9))
        scores = np.cumprod(confidences, axis=1)

        def worth(cut: tuple[int, ...], scores: np.ndarray = scores) -> float:
            return float(sum(scores[i, :count].sum() for i, count in enumerate(cut)))

        ways = itertools.product(*(range(length + 1) for length in lengths))
        best = max(worth(way) for way in ways if sum(way) <= budget)
        kept = VerifyBudget(Signal.TOP_PROB, budget).select(confidences, lengths, np.arange(4))
        assert (kept <= lengths).all()
        assert kept.sum() == min(budget, lengths.sum())
        assert worth(tuple(kept)) == pytest.approx(best)


def test_equal_scores_keep_beginnings() -> None:
    budget = VerifyBudget(Signal.TOP_PROB, 5)
    assert budget.select(np.ones((3, 4)), np.array([4, 4, 4]), np.arange(3)).tolist() == [2, 2, 1]


@pytest.mark.parametrize("seeded", [False, True], ids=["free", "seeded"])
@pytest.mark.parametrize("draft", ["close", "far", "ngram"])
def test_lossless_however_much_is_cut(draft: str, seeded: bool) -> None:
    params = SamplingParams(max_tokens=LENGTH, ignore_eos=True)
    counts = sample_outputs(DRAFTS[draft], "tetris:150,length=3", params, seeded, 2500)
    assert p_value(enumerate_outputs(params), counts) > TOO_UNLIKELY


@pytest.mark.parametrize("budget", [0, 1, 4, 1000])
def test_greedy_text_is_that_of_the_target_alone(budget: int) -> None:
    target, draft = tiny_model(seed=1), tiny_model(seed=1, noise=0.2)
    prompts = [[3, 1, 4, 1, 5], [9, 2, 6], [5, 3, 5, 8, 9, 7, 9]]
    params = SamplingParams(temperature=0, max_tokens=24)
    plain = complete(make_engine(target, None), prompts, params)
    engine = make_engine(target, draft, f"tetris:{budget},length=3")
    outputs = complete(engine, prompts, params)
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in plain]
    assert (engine.metrics.num_cut > 0) == (budget < 9)
    assert engine.metrics.num_undrafted == 0
