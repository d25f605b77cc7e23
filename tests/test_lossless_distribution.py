"""At temperature > 0 the output has exactly the target's distribution, for every draft, policy and sampling parameter.

The expected distribution is enumerated: all continuations of a small vocabulary, with a sampling rule written here from
the documentation of `SamplingParams` and not from the engine's code.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import ArrayLike, NDArray
from scipy import stats

from dsde import SamplingParams
from dsde.models.batch import pack
from dsde.policies import POLICIES, STAGES, Auto, BatchView, CostModel, Plan, Policy
from tiny import DEVICE, make_engine, run, tiny_model

VOCAB = 6
LENGTH = 4
TARGET = tiny_model(VOCAB, seed=3)
DRAFTS = {"close": tiny_model(VOCAB, seed=3, noise=0.3), "far": tiny_model(VOCAB, seed=8, layers=1), "ngram": "ngram"}
PROMPT = [1, 4, 1, 4, 2, 1, 4]
NUM_REQUESTS = 1500


class Changing(Policy):
    """Lengths that change from step to step and from sequence to sequence, zero included."""

    def __init__(self) -> None:
        self.count = 0

    def plan(self, batch: BatchView) -> Plan:
        self.count += 1
        lengths = np.minimum((batch.slots * 7 + self.count) % 4, batch.rooms)
        return Plan(lengths, lengths.astype(float), np.ones(len(lengths), dtype=bool))


@cache
def raw_logits(*tokens: int) -> np.ndarray:
    """Logits of the target after `tokens`, from a forward pass of its own."""
    lengths = np.array([len(tokens)])
    batch = pack(np.array(tokens), lengths, lengths, [list(range(2))], lengths - 1, DEVICE)
    return TARGET.forward(batch, TARGET.new_cache(2))[0].double().numpy()


def expected_next(tokens: list[int], params: SamplingParams) -> np.ndarray:
    """What one position samples from, straight from the documentation."""
    logits = raw_logits(*tokens).copy()
    output = tokens[len(PROMPT) :]
    for token, bias in params.logit_bias.items():
        logits[token] += bias
    if len(output) < params.min_tokens:
        logits[params.stop_token_ids] = -np.inf
    for token in set(tokens):
        factor = params.repetition_penalty
        logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
    for token in set(output):
        logits[token] -= params.presence_penalty + params.frequency_penalty * output.count(token)
    probs = np.exp((logits - logits.max()) / params.temperature)
    probs /= probs.sum()
    probs[probs < params.min_p * probs.max()] = 0
    probs /= probs.sum()
    if params.top_k > 0:
        probs[probs < np.sort(probs)[-params.top_k]] = 0
        probs /= probs.sum()
    descending = np.sort(probs)[::-1]
    edge = descending[np.searchsorted(np.cumsum(descending), params.top_p - 1e-9)] if params.top_p < 1 else 0.0
    probs[probs < edge] = 0
    return probs / probs.sum()


def enumerate_outputs(params: SamplingParams) -> dict[tuple[int, ...], float]:
    """Every output and its probability."""
    finished: dict[tuple[int, ...], float] = {}
    growing: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(LENGTH):
        grown = {}
        for output, chance in growing.items():
            probs = expected_next([*PROMPT, *output], params)
            for token in np.flatnonzero(probs):
                ended = int(token) in params.stop_token_ids
                (finished if ended else grown)[(*output, int(token))] = chance * probs[token]
        growing = grown
    return finished | growing


def sample_outputs(
    draft: Any, policy: str | Policy, params: SamplingParams, seeded: bool, count: int
) -> dict[tuple[int, ...], int]:
    engine = make_engine(TARGET, draft, policy, max_num_seqs=256, seed=11)
    for number in range(count):
        engine.add(PROMPT, params if not seeded else with_seed(params, number))
    counts: dict[tuple[int, ...], int] = {}
    for output in run(engine).values():
        key = tuple(output.outputs[0].token_ids)
        counts[key] = counts.get(key, 0) + 1
    if policy != "off":
        assert engine.metrics.num_draft_tokens > count / 2
    return counts


def with_seed(params: SamplingParams, seed: int) -> SamplingParams:
    return SamplingParams(**{name: getattr(params, name) for name in params.__slots__} | {"seed": seed})


def p_value(expected: dict[tuple[int, ...], float], counts: dict[tuple[int, ...], int]) -> float:
    """Of whole outputs and of their beginnings, whichever are less likely: a rule that is a little wrong everywhere
    shows in a few tokens, another only in all of them."""
    assert sum(expected.values()) == pytest.approx(1.0)
    impossible = [output for output in counts if output not in expected]
    assert not impossible, f"outputs of probability 0 were drawn: {impossible[:3]}"
    lengths = range(1, LENGTH + 1)
    return min(1.0, LENGTH * min(chi_square(beginnings(expected, n), beginnings(counts, n)) for n in lengths))


def beginnings(values: Mapping[tuple[int, ...], float], length: int) -> dict[tuple[int, ...], float]:
    sums: dict[tuple[int, ...], float] = {}
    for output, value in values.items():
        sums[output[:length]] = sums.get(output[:length], 0) + value
    return sums


def chi_square(expected: dict[tuple[int, ...], float], counts: dict[tuple[int, ...], float]) -> float:
    """Outputs expected fewer than five times are taken together."""
    total = sum(counts.values())
    common = [output for output, chance in expected.items() if chance * total >= 5]
    observed = [counts.get(output, 0) for output in common]
    wanted = [expected[output] * total for output in common]
    if total - sum(wanted) > 1e-6:
        observed.append(total - sum(observed))
        wanted.append(total - sum(wanted))
    if len(wanted) == 1:
        return 1.0
    return float(stats.chisquare(observed, wanted, sum_check=False).pvalue)


PARAMS = {
    "plain": {},
    "hot": {"temperature": 1.7},
    "cold": {"temperature": 0.4},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.25},
    "repetition": {"repetition_penalty": 1.6},
    "presence": {"presence_penalty": 1.2},
    "frequency": {"frequency_penalty": -0.9},
    "bias": {"logit_bias": {2: 1.5, 5: -2.0}},
    "stop": {"stop_token_ids": [3], "min_tokens": 2},
    "everything": {
        "temperature": 1.2,
        "top_k": 5,
        "top_p": 0.95,
        "min_p": 0.02,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.3,
        "logit_bias": {1: 0.7},
        "stop_token_ids": [3],
        "min_tokens": 3,
    },
}
SETUPS = [("static:3", "close"), ("static:3", "ngram")]
OTHER_SETUPS = [
    ("plain", "static:3", "far", True),
    ("everything", "static:3", "far", False),
    ("plain", "dsde", "close", False),
    ("everything", "dsde", "close", True),
    ("plain", "dsde:release", "far", True),
    ("everything", "dsde:release", "far", False),
    ("plain", "dsde", "ngram", False),
    ("everything", "dsde", "ngram", True),
]

TOO_UNLIKELY = 1e-4
"""With about 90 comparisons a sound engine falls below this once in 110 runs of other seeds; these seeds are fixed."""


@pytest.mark.parametrize("seeded", [False, True], ids=["free", "seeded"])
@pytest.mark.parametrize(("policy", "draft"), SETUPS, ids=[f"{p}-{d}" for p, d in SETUPS])
@pytest.mark.parametrize("name", PARAMS)
def test_distribution(name: str, policy: str, draft: str, seeded: bool) -> None:
    check_distribution(name, policy, draft, seeded)


@pytest.mark.parametrize(("name", "policy", "draft", "seeded"), OTHER_SETUPS)
def test_distribution_of_other_setups(name: str, policy: str, draft: str, seeded: bool) -> None:
    check_distribution(name, policy, draft, seeded)


class FreeDrafts(CostModel):
    """A machine on which `auto` has no reason not to draft."""

    def draft_s(self, batch_sizes: ArrayLike) -> NDArray[np.float64]:
        return np.zeros(np.shape(batch_sizes))

    def verify_s(self, tokens: ArrayLike) -> NDArray[np.float64]:
        return 1.0 + 1e-4 * np.asarray(tokens, np.float64)

    def is_below(self, tokens: float) -> bool:
        return False


def check_distribution(name: str, policy: str | Policy, draft: str, seeded: bool, count: int = NUM_REQUESTS) -> None:
    params = SamplingParams(max_tokens=LENGTH, ignore_eos=True, **PARAMS[name])
    counts = sample_outputs(DRAFTS[draft], policy, params, seeded, count)
    assert p_value(enumerate_outputs(params), counts) > TOO_UNLIKELY


EXAMPLES = {entry.example for entry in (*POLICIES.values(), *STAGES.values()) if entry.lossless}


@pytest.mark.parametrize("example", sorted(EXAMPLES - {"off"}))
def test_distribution_of_every_policy_and_stage(example: str) -> None:
    policy = Auto(cost=FreeDrafts()) if example.startswith("auto") else example
    check_distribution("plain", policy, "close", seeded=False, count=NUM_REQUESTS // 2)


@pytest.mark.parametrize("draft", ["close", "far", "ngram"])
def test_lengths_that_change_at_every_step(draft: str) -> None:
    params = SamplingParams(max_tokens=LENGTH, ignore_eos=True)
    counts = sample_outputs(DRAFTS[draft], Changing(), params, False, 2 * NUM_REQUESTS)
    assert p_value(enumerate_outputs(params), counts) > TOO_UNLIKELY


def test_without_speculation() -> None:
    params = SamplingParams(max_tokens=LENGTH, ignore_eos=True)
    counts = sample_outputs(None, "off", params, False, 2 * NUM_REQUESTS)
    assert p_value(enumerate_outputs(params), counts) > TOO_UNLIKELY


@pytest.mark.parametrize("seeded", [False, True], ids=["free", "seeded"])
def test_the_test_can_fail(seeded: bool) -> None:
    """A target that is slightly off is noticed with as many requests."""
    params = SamplingParams(max_tokens=LENGTH, ignore_eos=True)
    slightly_hotter = SamplingParams(max_tokens=LENGTH, ignore_eos=True, temperature=1.15)
    counts = sample_outputs(DRAFTS["close"], "static:3", slightly_hotter, seeded, NUM_REQUESTS)
    assert p_value(enumerate_outputs(params), counts) < TOO_UNLIKELY


def test_outputs_of_different_requests_are_independent() -> None:
    """Unseeded requests with the same prompt must not echo each other: neighbours agree as often as chance allows."""
    params = SamplingParams(max_tokens=LENGTH, ignore_eos=True)
    engine = make_engine(TARGET, DRAFTS["close"], "static:3")
    for _ in range(NUM_REQUESTS):
        engine.add(PROMPT, params)
    outputs = [tuple(output.outputs[0].token_ids) for _, output in sorted(run(engine).items(), key=by_number)]
    agreeing = sum(a == b for a, b in itertools.pairwise(outputs))
    chance = sum(probability**2 for probability in enumerate_outputs(params).values())
    assert stats.binomtest(agreeing, len(outputs) - 1, chance).pvalue > TOO_UNLIKELY


def by_number(item: tuple[str, Any]) -> int:
    return int(item[0].rpartition("-")[2])


def test_expected_next_is_a_distribution() -> None:
    for options in PARAMS.values():
        probs = expected_next(PROMPT, SamplingParams(max_tokens=LENGTH, **options))
        assert probs.sum() == pytest.approx(1.0)
        assert torch.isfinite(torch.from_numpy(probs)).all()
