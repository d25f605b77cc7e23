"""At temperature 0 every policy and every draft gives, token for token, what the target gives alone; and with a seed
the same holds at any temperature, whatever else is in the batch and whenever it arrived."""

from __future__ import annotations

import random
from typing import Any

import pytest

from dsde import RequestOutput, SamplingParams
from dsde.engine.engine import Engine
from tiny import make_engine, run, tiny_model

VOCAB = 64
TARGET = tiny_model(VOCAB, seed=7)
DRAFTS = {"close": tiny_model(VOCAB, seed=7, noise=0.15), "far": tiny_model(VOCAB, seed=99, layers=1), "ngram": "ngram"}
SETUPS = [
    ("static:4", "close"),
    ("static:1", "far"),
    ("dsde", "close"),
    ("dsde:release", "far"),
    ("static:6", "ngram"),
    ("auto", "close"),
    ("auto", "ngram"),
]

Work = list[tuple[list[int], SamplingParams]]


def random_params(rng: random.Random, greedy: bool) -> SamplingParams:
    maybe: dict[str, Any] = {
        "repetition_penalty": rng.choice([1.1, 1.5, 0.9]),
        "presence_penalty": rng.uniform(-1, 1),
        "frequency_penalty": rng.uniform(-1, 1),
        "logit_bias": {rng.randrange(VOCAB): rng.uniform(-3, 3) for _ in range(3)},
        "stop_token_ids": [rng.randrange(VOCAB)],
        "logprobs": rng.randrange(4),
        "prompt_logprobs": rng.randrange(3),
        "min_tokens": rng.randrange(6),
        "n": 2,
    }
    if not greedy:
        maybe |= {"top_k": rng.randrange(1, 20), "top_p": rng.uniform(0.3, 1), "min_p": rng.uniform(0, 0.2)}
    chosen = {name: value for name, value in maybe.items() if rng.random() < 0.25}
    temperature = 0.0 if greedy else rng.uniform(0.3, 1.5)
    return SamplingParams(
        max_tokens=rng.randrange(6, 48),
        temperature=temperature,
        seed=None if greedy else rng.randrange(1 << 40),
        speculation=rng.choice(["on", "on", "on", "off", rng.randrange(7)]),
        **chosen,
    )


def random_work(seed: int, count: int, greedy: bool) -> Work:
    rng = random.Random(seed)
    shared = [rng.randrange(VOCAB) for _ in range(40)]
    work = []
    for _ in range(count):
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 60))]
        if rng.random() < 0.4:
            prompt = shared[: rng.randrange(1, 40)] + prompt[:5]
        work.append((prompt, random_params(rng, greedy)))
    return work


def answers_alone(work: Work) -> list[RequestOutput]:
    outputs = []
    for prompt, params in work:
        engine = make_engine(TARGET, None)
        request_id = engine.add(prompt, params)
        outputs.append(run(engine)[request_id])
    return outputs


def answers_together(engine: Engine, work: Work, seed: int) -> list[RequestOutput]:
    """All of it in one engine, arriving at random moments."""
    rng = random.Random(seed)
    waiting, done, ids = list(work), {}, []
    while waiting or engine.has_work:
        for _ in range(rng.choice([0, 0, 1, 3])):
            if waiting:
                ids.append(engine.add(*waiting.pop(0)))
        if engine.has_work:
            done.update((output.request_id, output) for output in engine.step().finished)
    return [done[request_id] for request_id in ids]


def check_same(expected: list[RequestOutput], actual: list[RequestOutput]) -> None:
    for want, got in zip(expected, actual, strict=True):
        for a, b in zip(want.outputs, got.outputs, strict=True):
            assert b.token_ids == a.token_ids
            assert (b.finish_reason, b.stop_reason) == (a.finish_reason, a.stop_reason)
            check_logprobs(a.logprobs, b.logprobs)
        check_logprobs(want.prompt_logprobs, got.prompt_logprobs)


def check_logprobs(expected: Any, actual: Any) -> None:
    assert (expected is None) == (actual is None)
    for want, got in zip(expected or [], actual or [], strict=True):
        if want is None:
            assert got is None
            continue
        assert list(got) == list(want)
        for token, logprob in want.items():
            assert got[token].rank == logprob.rank
            assert got[token].logprob == pytest.approx(logprob.logprob, abs=1e-4)


@pytest.mark.parametrize("greedy", [True, False], ids=["greedy", "seeded"])
def test_a_hundred_random_requests(greedy: bool) -> None:
    work = random_work(seed=1 if greedy else 2, count=100, greedy=greedy)
    expected = answers_alone(work)
    for place, (policy, draft) in enumerate(SETUPS):
        engine = make_engine(TARGET, DRAFTS[draft], policy, max_num_seqs=24, max_num_batched_tokens=64)
        check_same(expected, answers_together(engine, work, seed=place))
        assert engine.metrics.num_accepted_tokens > 0
        assert engine.metrics.num_draft_tokens > engine.metrics.num_accepted_tokens


def test_seeds_matter() -> None:
    """The other half of "the same seed gives the same text"."""
    engine = make_engine(TARGET, DRAFTS["close"], "static:3")
    texts = [
        tuple(output.outputs[0].token_ids)
        for output in answers_together(
            engine, [([1, 2, 3], SamplingParams(temperature=1.0, max_tokens=12, seed=seed)) for seed in range(20)], 0
        )
    ]
    assert len(set(texts)) == 20
