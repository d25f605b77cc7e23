"""Sampling against obvious versions of itself, on random rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from dsde import InvalidInput, SamplingParams
from dsde.core.rng import Purpose, derive_stream, uniforms
from dsde.sampling.sampler import exponentials, invert
from dsde.sampling.truncation import truncate
from dsde.verification.divergence import kl_divergence, point_mass_divergence


def truncate_obviously(row: np.ndarray, min_p: float, top_k: int, top_p: float) -> np.ndarray:
    row = row.astype(np.float64)
    row = np.where(row >= np.float32(min_p) * row.max(), row, 0)
    if 0 < top_k < len(row):
        row = np.where(row >= np.sort(row)[-top_k], row, 0)
    if top_p < 1:
        descending = np.sort(row)[::-1]
        edge = descending[np.argmax(np.cumsum(descending) >= top_p * row.sum())]
        row = np.where(row >= edge, row, 0)
    return row / row.sum()


@settings(max_examples=300, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    vocab=st.sampled_from([2, 7, 300, 5000]),
    spread=st.sampled_from([0.0, 0.1, 1.0, 4.0, 20.0]),
    min_p=st.sampled_from([0.0, 0.0, 1e-6, 0.05, 0.5, 1.0]),
    top_k=st.sampled_from([0, -1, 1, 2, 40, 2000, 10_000]),
    top_p=st.sampled_from([1.0, 1.0, 0.999, 0.9, 0.5, 1e-6]),
)
def test_truncation(seed: int, vocab: int, spread: float, min_p: float, top_k: int, top_p: float) -> None:
    logits = np.random.default_rng(seed).normal(size=vocab) * spread
    probs = torch.softmax(torch.from_numpy(logits).float(), -1)
    expected = truncate_obviously(probs.numpy(), min_p, top_k, top_p)
    actual = probs.clone().unsqueeze(0)
    truncate(actual, [min_p], [top_k], [top_p])
    # A sum that lands on the edge of the nucleus may fall either way; everything else must agree.
    kept, wanted = actual[0].numpy() > 0, expected > 0
    if (kept != wanted).any():
        assert top_p < 1
        assert probs.numpy()[kept != wanted].sum() < 2 * probs.numpy()[kept].min() + 1e-6
    else:
        np.testing.assert_allclose(actual[0].numpy(), expected, atol=1e-6)


def test_truncation_leaves_other_rows_untouched() -> None:
    probs = torch.softmax(torch.randn(3, 1000), -1)
    mixed = probs.clone()
    truncate(mixed, [0.0, 0.1, 0.0], [0, 0, 0], [1.0, 1.0, 1.0])
    assert torch.equal(mixed[0], probs[0])
    assert torch.equal(mixed[2], probs[2])
    assert not torch.equal(mixed[1], probs[1])


@pytest.mark.parametrize("vocab", [1, 5, 256, 257, 1000])
def test_inversion_has_the_distribution_of_the_weights(vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    weights = rng.exponential(size=vocab) ** 3
    weights[rng.random(vocab) < 0.3] = 0
    weights[0] = 1
    count = 20_000
    u = uniforms(np.full(count, 9, np.uint64), np.arange(count), np.zeros(count, np.int64), Purpose.EMIT)
    drawn = invert(torch.from_numpy(weights).float().expand(count, -1), torch.from_numpy(u)).numpy()
    assert (weights[drawn] > 0).all()
    check_counts(np.bincount(drawn, minlength=vocab), weights / weights.sum())


@pytest.mark.parametrize("u", [0.0, 0.5, 1 - 2**-53])
def test_inversion_never_draws_what_has_no_weight(u: float) -> None:
    for seed in range(50):
        rng = np.random.default_rng(seed)
        weights = torch.from_numpy(rng.exponential(size=(1, 700))).float()
        weights[0, rng.random(700) < 0.9] = 0
        weights[0, [0, 255, 256, 699]] = 0
        weights[0, 300] = 1e-30
        assert weights[0, invert(weights, torch.tensor([u], dtype=torch.float64))] > 0


def test_the_race_has_the_distribution_of_the_weights() -> None:
    probs = torch.tensor([0.5, 0.25, 0.15, 0.0, 0.0999, 0.0001])
    wins = np.zeros(6, dtype=int)
    for position in range(20_000):
        wins[int((probs / exponentials(derive_stream(1), position, 6)).argmax())] += 1
    assert wins[3] == 0
    check_counts(wins, probs.numpy())


def check_counts(counts: np.ndarray, probs: np.ndarray) -> None:
    expected = probs / probs.sum() * counts.sum()
    common = expected >= 5
    observed, wanted = [*counts[common], counts[~common].sum()], [*expected[common], expected[~common].sum()]
    if wanted[-1] < 1e-9:
        observed, wanted = observed[:-1], wanted[:-1]
    if len(wanted) > 1:
        assert stats.chisquare(observed, wanted, sum_check=False).pvalue > 1e-4


def test_random_numbers_depend_on_every_part_of_their_key() -> None:
    def one(stream: int, step: int, offset: int, purpose: Purpose) -> float:
        return float(uniforms(np.array([stream], np.uint64), np.array([step]), np.array([offset]), purpose)[0])

    keys = [(s, t, o, p) for s in (0, 1, 2**63) for t in (0, 1) for o in (0, 1) for p in Purpose]
    values = [one(*key) for key in keys]
    assert len(set(values)) == len(keys)
    assert values == [one(*key) for key in keys]
    assert derive_stream(1, 2) != derive_stream(2, 1)
    assert derive_stream(-1) != derive_stream(1)


def test_uniforms_are_uniform() -> None:
    count = 50_000
    for streams, steps in ((np.arange(count), np.zeros(count)), (np.zeros(count), np.arange(count))):
        values = uniforms(streams.astype(np.uint64), steps.astype(np.int64), np.zeros(count, np.int64), Purpose.DRAFT)
        assert stats.kstest(values, "uniform").pvalue > 1e-4
        assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.02


@pytest.mark.parametrize("rows", [0, 1, 3, 4, 9])
def test_divergence(rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    target = torch.randn(rows, 500, generator=generator) * 3
    draft = target + torch.randn(rows, 500, generator=generator)
    p = torch.softmax(target.double(), -1)
    q = torch.softmax(draft.double(), -1)
    expected = (p * (p.clamp(min=1e-8).log() - q.clamp(min=1e-8).log())).sum(-1)
    torch.testing.assert_close(
        kl_divergence(target, torch.arange(rows), draft).double(), expected, atol=1e-5, rtol=1e-4
    )
    assert torch.equal(kl_divergence(target, torch.arange(rows), target), torch.zeros(rows))


def test_divergence_is_clamped() -> None:
    target, draft = torch.full((1, 10), -100.0), torch.full((1, 10), -100.0)
    target[0, 3], draft[0, 4] = 100.0, 100.0
    expected = torch.tensor([18.420681])
    torch.testing.assert_close(kl_divergence(target, torch.tensor([0]), draft), expected)
    torch.testing.assert_close(point_mass_divergence(target, torch.tensor([4])), expected)
    torch.testing.assert_close(point_mass_divergence(target, torch.tensor([3])), torch.zeros(1))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0),
        ("max_tokens", 0),
        ("min_tokens", -1),
        ("min_tokens", 1000),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", "warm"),
        ("top_k", -2),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("repetition_penalty", 0.0),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -3),
        ("logit_bias", {1: 200.0}),
        ("logit_bias", [1]),
        ("seed", 1.5),
        ("seed", 2**64),
        ("stop", [""]),
        ("stop", 5),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", 3),
        ("logprobs", -1),
        ("prompt_logprobs", True),
        ("speculation", "maybe"),
        ("speculation", -1),
        ("slo_tpot_ms", 0),
        ("slo_tpot_ms", float("inf")),
        ("slo_tpot_ms", "fast"),
    ],
)
def test_bad_parameters_are_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(InvalidInput, match=field):
        SamplingParams(**{field: value})  # type: ignore[arg-type]
