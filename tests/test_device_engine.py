"""The engine where draft, target and verdict are queued on a device: the same texts as on the host, whatever happens.

On a CUDA device with its kernels and graphs. Elsewhere the executor's own work is tested with plain kernels, with and
without graphs that are only played, and a few short texts are made by the real kernels in Triton's interpreter.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

pytest.importorskip("triton")

import plain_kernels
from dsde import RequestOutput, SamplingParams
from dsde.device import backend
from dsde.engine.device_executor import DeviceExecutor
from dsde.engine.engine import Engine
from dsde.engine.executor import HostExecutor
from dsde.models import passes
from dsde.models.batch import BLOCK_SIZE
from dsde.models.decoder import Decoder
from dsde.policies import BatchView, Plan, Policy
from test_lossless_distribution import LENGTH, PROMPT, TOO_UNLIKELY, enumerate_outputs, p_value, with_seed
from test_lossless_greedy import answers_together, check_same
from tiny import complete, make_engine, run, tiny_model

VOCAB = 64
HAS_CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_CUDA else "cpu")
NUM_REQUESTS = 300 if HAS_CUDA else 16
needs_gpu = [pytest.mark.gpu, pytest.mark.skipif(not HAS_CUDA, reason="needs a CUDA device")]
WAYS = [pytest.param("kernels", marks=pytest.mark.gpu)] if HAS_CUDA else ["plain", "graphs"]
GREEDY = SamplingParams(temperature=0, max_tokens=24)
SETUPS = [("off", "none"), ("static:1", "far"), ("static:4", "close"), ("dsde", "close"), ("static:3", "ngram")]

Work = list[tuple[list[int], SamplingParams]]


@dataclass(slots=True)
class Way:
    """How engines of a test run."""

    monkeypatch: pytest.MonkeyPatch

    def engine(self, draft: str, policy: str | Policy = "static:4", **settings: Any) -> Engine:
        engine = make_engine(model("target"), model(draft), policy, **settings)
        assert isinstance(engine.executor, DeviceExecutor)
        return engine

    @contextmanager
    def host(self) -> Iterator[None]:
        """Engines on the CPU go the host's way."""
        with self.monkeypatch.context() as patch:
            patch.setattr(backend, "has_kernels", lambda device: device.type == "cuda")
            yield

    def alone(self, work: Work) -> list[RequestOutput]:
        """What the target says on the host, one request at a time."""
        outputs = []
        with self.host():
            for prompt, params in work:
                engine = make_engine(model("target", torch.device("cpu")), None)
                assert isinstance(engine.executor, HostExecutor)
                outputs += complete(engine, [prompt], params)
        return outputs

    def alone_on_device(self, work: Work) -> list[RequestOutput]:
        """The same on the device: seeds lead to other texts there."""
        return [complete(self.engine("none", "off"), [prompt], params)[0] for prompt, params in work]


def use_device(monkeypatch: pytest.MonkeyPatch) -> None:
    if not HAS_CUDA:
        monkeypatch.setattr(backend, "has_kernels", lambda _: True)


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Way:
    use_device(monkeypatch)
    if request.param != "kernels":
        plain_kernels.install(monkeypatch, with_graphs=request.param == "graphs")
    return Way(monkeypatch)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Way:
    """The real kernels, interpreted where there is no device: a second buys about three steps."""
    use_device(monkeypatch)
    return Way(monkeypatch)


MODELS: dict[str, dict[str, Any]] = {
    "target": {"seed": 7, "layers": 1},
    "close": {"seed": 7, "layers": 1, "noise": 0.15},
    "far": {"seed": 99, "layers": 1},
    "small vocabulary": {"vocab": VOCAB - 20, "seed": 7, "layers": 1},
    "short context": {"seed": 7, "layers": 1, "max_len": 32},
}


@cache
def model(name: str, device: torch.device = DEVICE) -> Any:
    if name in MODELS:
        return tiny_model(**{"vocab": VOCAB, "device": device} | MODELS[name])
    return None if name == "none" else name


def block_bytes(draft: str) -> int:
    models = [m for m in (model("target"), model(draft)) if isinstance(m, Decoder)]
    return sum(m.config.kv_bytes_per_token(m.dtype) for m in models) * BLOCK_SIZE


def random_prompt(rng: random.Random, low: int, high: int) -> list[int]:
    return [rng.randrange(VOCAB) for _ in range(rng.randrange(low, high))]


def random_work(seed: int, greedy: bool, edited: float = 0.0, count: int = NUM_REQUESTS) -> Work:
    """Requests of all kinds; a share of them has logits that are edited by their own tokens."""
    rng = random.Random(seed)
    shared = random_prompt(rng, 64, 65)
    work = []
    for _ in range(count):
        prompt = random_prompt(rng, 1, 50)
        if rng.random() < 0.4:
            prompt = shared[: rng.randrange(1, 50)] + prompt[:4]
        options: dict[str, Any] = {
            "stop_token_ids": [rng.randrange(VOCAB)],
            "logprobs": 2,
            "prompt_logprobs": 1,
            "n": 2,
        }
        options = {name: value for name, value in options.items() if rng.random() < 0.2}
        if not greedy and rng.random() < 0.4:
            options |= {"top_k": rng.randrange(1, 20), "top_p": rng.uniform(0.3, 1), "min_p": rng.uniform(0, 0.2)}
        if rng.random() < edited:
            edits = [
                {"repetition_penalty": 1.3},
                {"presence_penalty": 0.7},
                {"logit_bias": {3: 2.0}},
                {"min_tokens": 4},
            ]
            options |= rng.choice(edits)
        params = SamplingParams(
            max_tokens=rng.randrange(5, 40),
            temperature=0.0 if greedy else 0.9,
            seed=None if greedy else rng.randrange(1 << 40),
            speculation=rng.choice(["on", "on", "on", "off", rng.randrange(9)]),
            **options,
        )
        work.append((prompt, params))
    return work


def tokens_of(outputs: list[RequestOutput]) -> list[list[list[int]]]:
    return [[completion.token_ids for completion in output.outputs] for output in outputs]


def check_nothing_is_held(engine: Engine) -> None:
    assert engine.scheduler.pool.num_free == engine.scheduler.pool.num_blocks
    assert not engine.requests


# The same text


@pytest.mark.parametrize(("policy", "draft"), SETUPS, ids=[f"{p}-{d}" for p, d in SETUPS])
def test_greedy_text_is_the_hosts(way: Way, policy: str, draft: str) -> None:
    work = random_work(seed=1, greedy=True)
    engine = way.engine(draft, policy, max_num_seqs=16, max_num_batched_tokens=40)
    check_same(way.alone(work), answers_together(engine, work, seed=2))
    assert engine.metrics.num_host_steps == 0
    assert (engine.metrics.num_accepted_tokens > 0) == (draft != "none")
    check_nothing_is_held(engine)


@pytest.mark.parametrize(("policy", "draft"), SETUPS, ids=[f"{p}-{d}" for p, d in SETUPS])
def test_seeded_text_depends_on_the_seed_alone(way: Way, policy: str, draft: str) -> None:
    work = random_work(seed=3, greedy=False)
    engine = way.engine(draft, policy, max_num_seqs=16, max_num_batched_tokens=40)
    check_same(way.alone_on_device(work), answers_together(engine, work, seed=4))


@pytest.mark.parametrize("greedy", [True, False], ids=["greedy", "seeded"])
@pytest.mark.parametrize("draft", ["close", "ngram"])
def test_edited_requests_share_batches_with_others(way: Way, draft: str, greedy: bool) -> None:
    """Steps with one of them go the host's way, and nobody must notice."""
    work = random_work(seed=5, greedy=greedy, edited=0.25)
    engine = way.engine(draft, "static:5", max_num_seqs=8)
    expected = way.alone(work) if greedy else way.alone_on_device(work)
    check_same(expected, answers_together(engine, work, seed=6))
    assert 0 < engine.metrics.num_host_steps < engine.metrics.num_steps


def test_steps_of_an_edited_request_are_counted(way: Way) -> None:
    engine = way.engine("close")
    output = complete(engine, [[1, 2, 3]], SamplingParams(temperature=0, max_tokens=12, presence_penalty=0.5))[0]
    assert engine.metrics.num_host_steps == engine.metrics.num_steps == output.metrics.num_steps
    complete(engine, [[1, 2, 3]], GREEDY)
    assert engine.metrics.num_host_steps == output.metrics.num_steps


@pytest.mark.parametrize("seed", range(10 if HAS_CUDA else 4))
def test_blocks_that_change_hands_while_the_host_steps(way: Way, seed: int) -> None:
    """A rejected draft's look-ahead block goes to a newcomer; the device must not remember it as its owner's."""
    rng = random.Random(seed)
    prompts = [random_prompt(rng, 20, 21), random_prompt(rng, 40, 41)]
    engine = way.engine("far", "static:14", kv_cache_bytes=40 * block_bytes("far"))
    long = SamplingParams(temperature=0, max_tokens=80)
    first = engine.add(prompts[0], long)
    for _ in range(rng.randrange(4, 20)):
        engine.step()
    engine.add(prompts[1], SamplingParams(temperature=0, max_tokens=30, presence_penalty=0.1, speculation="off"))
    second = engine.add(prompts[1], SamplingParams(temperature=0, max_tokens=60, speculation="off"))
    done = run(engine)
    assert engine.metrics.num_host_steps >= 30
    expected = way.alone([(prompts[0], long), (prompts[1], SamplingParams(temperature=0, max_tokens=60))])
    assert tokens_of([done[first], done[second]]) == tokens_of(expected)


@pytest.mark.parametrize("draft", ["small vocabulary", "short context"])
def test_a_draft_may_know_less_than_its_target(way: Way, draft: str) -> None:
    work = [(prompt, GREEDY) for prompt in ([VOCAB - 1, VOCAB - 2, 3], [5] * 28)]
    engine = way.engine(draft)
    assert tokens_of(complete(engine, [prompt for prompt, _ in work], GREEDY)) == tokens_of(way.alone(work))
    assert engine.metrics.num_draft_tokens > 0


def test_looked_up_drafts_reach_the_device(way: Way) -> None:
    """As many of them are right as on the host, which looks at them one by one."""
    prompts = [[token, token + 1] * 6 for token in range(1, 13)]
    engine = way.engine("ngram")
    outputs = complete(engine, prompts, GREEDY)
    with way.host():
        on_host = make_engine(model("target", torch.device("cpu")), "ngram", "static:4")
        assert tokens_of(complete(on_host, prompts, GREEDY)) == tokens_of(outputs)
    for name in ("num_draft_tokens", "num_accepted_tokens"):
        assert getattr(engine.metrics, name) == getattr(on_host.metrics, name) > 0


def test_the_longest_draft_of_a_single_sequence(way: Way) -> None:
    params = SamplingParams(temperature=0, max_tokens=140, speculation=128)
    engine = way.engine("target", max_num_seqs=1, max_num_batched_tokens=8)
    assert tokens_of(complete(engine, [[1, 2]], params)) == tokens_of(way.alone([([1, 2], params)]))
    assert engine.metrics.num_draft_tokens >= 128


# Whatever happens meanwhile


class Alternating(Policy):
    """Three steps with a draft, three without, half of the sequences each."""

    def __init__(self) -> None:
        self.num_steps = 0

    def plan(self, batch: BatchView) -> Plan:
        self.num_steps += 1
        lengths = np.minimum(np.where((batch.slots + self.num_steps // 3) % 2, 3, 0), batch.rooms)
        return Plan(lengths, lengths.astype(float), np.ones(len(lengths), dtype=bool))


@pytest.mark.parametrize("seed", range(8 if HAS_CUDA else 4))
def test_a_draft_that_is_the_target_is_never_rejected(way: Way, seed: int) -> None:
    """Pauses, preemptions, shared blocks, aborts: one hole in the draft's KV and a token would fall."""
    rng = random.Random(seed)
    work = random_work(seed, greedy=seed % 2 == 0, count=20)
    expected = way.alone(work) if seed % 2 == 0 else way.alone_on_device(work)
    engine = way.engine(
        "target",
        Alternating(),
        kv_cache_bytes=rng.choice([7, 12]) * block_bytes("target"),
        max_num_seqs=rng.choice([3, 8]),
        max_num_batched_tokens=rng.choice([3, 17, 200]),
        max_model_len=128,
    )
    names: list[str] = []
    done: dict[str, RequestOutput] = {}
    aborted = set()
    while len(names) < len(work) or engine.has_work:
        while len(names) < len(work) and rng.random() < 0.7:
            names.append(engine.add(*work[len(names)]))
        if rng.random() < 0.05 and engine.abort(name := rng.choice(names)) is not None:
            aborted.add(name)
        done.update((output.request_id, output) for output in engine.step().finished)
    kept = [place for place, name in enumerate(names) if name not in aborted]
    assert tokens_of([done[names[place]] for place in kept]) == tokens_of([expected[place] for place in kept])
    # A device may round differently for every number of rows.
    rejected = engine.metrics.num_draft_tokens - engine.metrics.num_accepted_tokens
    assert rejected <= (engine.metrics.num_draft_tokens // 1000 if HAS_CUDA else 0)
    assert engine.metrics.num_draft_tokens > 0
    check_nothing_is_held(engine)


@pytest.mark.parametrize("greedy", [True, False], ids=["greedy", "seeded"])
@pytest.mark.parametrize("draft", ["close", "ngram"])
def test_memory_for_two_and_a_half(way: Way, draft: str, greedy: bool) -> None:
    work = random_work(seed=7, greedy=greedy, count=16)
    engine = way.engine(draft, "static:5", kv_cache_bytes=9 * block_bytes(draft), max_model_len=128)
    expected = way.alone(work) if greedy else way.alone_on_device(work)
    check_same(expected, answers_together(engine, work, seed=8))
    assert engine.metrics.num_preemptions > 0
    check_nothing_is_held(engine)


@pytest.mark.parametrize("num_steps", [1, 2, 4])
def test_aborts_while_a_step_is_under_way(way: Way, num_steps: int) -> None:
    rng = random.Random(num_steps)
    prompts = [random_prompt(rng, 20, 60) for _ in range(4)]
    engine = way.engine("close", "dsde", max_num_batched_tokens=48)
    kept = engine.add(prompts[0], GREEDY)
    gone = [
        engine.add(prompts[1], SamplingParams(max_tokens=30, prompt_logprobs=1, n=2)),
        engine.add(prompts[2], SamplingParams(max_tokens=30, temperature=0), trace=True),
    ]
    for _ in range(num_steps):
        engine.step()
    slots = {s.slot for s in engine.scheduler.running}
    for name in gone:
        assert engine.abort(name) is not None
    # The same name and the slot of one who left, while the device still works for that one.
    again = [engine.add(prompts[3], GREEDY, name, trace=True) for name in gone]
    done = run(engine)
    expected = way.alone([(prompts[0], GREEDY), (prompts[3], GREEDY)])
    assert tokens_of([done[kept], done[again[0]], done[again[1]]]) == tokens_of([*expected, expected[1]])
    assert done[gone[0]].prompt_logprobs is None
    for name in again:
        trace = done[name].metrics.trace or []
        assert sum(record.accepted for record in trace) == done[name].metrics.num_accepted_tokens
    assert engine._num_slots <= max(len(slots), 4)
    check_nothing_is_held(engine)


def test_an_abort_while_its_prompt_is_scored(way: Way) -> None:
    engine = way.engine("close", max_num_batched_tokens=16)
    gone = engine.add([7] * 40, SamplingParams(temperature=0, max_tokens=4, prompt_logprobs=1))
    scored = SamplingParams(temperature=0, max_tokens=4, prompt_logprobs=1)
    kept = engine.add([8] * 20, scored)
    engine.step()
    engine.step()
    assert engine.abort(gone) is not None
    check_same(way.alone([([8] * 20, scored)]), [run(engine)[kept]])


def test_a_step_that_nobody_waits_for_any_more_is_over_before_the_next(way: Way) -> None:
    """Its inputs lie in a buffer that the next step writes."""
    engine = way.engine("close")
    name = engine.add([1, 2, 3], GREEDY)
    engine.step()
    engine.step()
    resets = []
    reset = engine.executor.reset
    way.monkeypatch.setattr(engine.executor, "reset", lambda: resets.append(reset()))
    engine.abort(name)
    assert engine.step().chunks == []
    assert len(resets) == 1
    assert tokens_of(complete(engine, [[4, 5]], GREEDY)) == tokens_of(way.alone([([4, 5], GREEDY)]))


@pytest.mark.parametrize("failing", [1, 2, 3, 5])
def test_a_step_that_fails_is_made_up_for(way: Way, failing: int) -> None:
    """Texts are right, and what ended in the step before is reported all the same."""
    work = [([i + 1, 9, 8], SamplingParams(temperature=0, max_tokens=i + 1)) for i in range(8)]
    engine = way.engine("close", "static:2")
    run_pass, num_runs = engine.executor.passes.run, 0

    def fail_once(*args: Any) -> Any:
        nonlocal num_runs
        num_runs += 1
        if num_runs == failing:
            raise RuntimeError("out of luck")
        return run_pass(*args)

    way.monkeypatch.setattr(engine.executor.passes, "run", fail_once)
    names = [engine.add(*one) for one in work]
    done: dict[str, RequestOutput] = {}
    num_failures = 0
    while engine.has_work:
        try:
            done.update((output.request_id, output) for output in engine.step().finished)
        except RuntimeError:
            num_failures += 1
    assert num_failures == 1
    assert sorted(done) == sorted(names)
    assert tokens_of([done[name] for name in names]) == tokens_of(way.alone(work))
    check_nothing_is_held(engine)


# The real kernels, interpreted where there is no device


@pytest.mark.parametrize(("policy", "draft"), [("static:3", "close"), ("static:3", "ngram")])
def test_kernels_give_the_hosts_text(kernels: Way, policy: str, draft: str) -> None:
    params = SamplingParams(temperature=0, max_tokens=6)
    work = [([5, 6, 7, 5, 6], params), ([9] * 18, params)]
    engine = kernels.engine(draft, policy)
    check_same(kernels.alone(work), answers_together(engine, work, seed=0))


def test_kernels_and_host_share_a_seeds_noise(kernels: Way) -> None:
    params = SamplingParams(temperature=0.9, seed=5, max_tokens=6)
    edited = SamplingParams(temperature=0, max_tokens=2, presence_penalty=1.0)
    alone = complete(kernels.engine("none", "off"), [[5, 6, 7]], params)
    engine = kernels.engine("close", "static:2")
    together = answers_together(engine, [([5, 6, 7], params), ([1, 2], edited)], seed=1)
    assert tokens_of(together[:1]) == tokens_of(alone)
    assert engine.metrics.num_host_steps > 0


def test_kernels_draw_what_may_be_drawn(kernels: Way) -> None:
    """Unseeded and truncated, the ratio rule: with top_k=1 there is one text only, and it is the greedy one."""
    params = SamplingParams(temperature=1.0, top_k=1, max_tokens=5)
    greedy = kernels.alone([([5, 6, 7], SamplingParams(temperature=0, max_tokens=5))])
    assert tokens_of(complete(kernels.engine("close", "static:2"), [[5, 6, 7]], params)) == tokens_of(greedy)


# The same distribution


DISTRIBUTION = {
    "plain": {},
    "hot": {"temperature": 1.7},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.25},
    "all": {"temperature": 1.2, "top_k": 5, "top_p": 0.95, "min_p": 0.02},
    "stop": {"stop_token_ids": [3], "min_tokens": 2},
}


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_CUDA, reason="needs a CUDA device")
@pytest.mark.parametrize("seeded", [False, True], ids=["free", "seeded"])
@pytest.mark.parametrize(
    ("policy", "draft"), [("static:2", "close"), ("static:2", "far"), ("static:3", "ngram"), (None, "close")]
)
@pytest.mark.parametrize("name", DISTRIBUTION)
def test_distribution(name: str, policy: str | None, draft: str, seeded: bool) -> None:
    count = 6000
    drafts: dict[str, Any] = {
        "close": lambda: tiny_model(6, seed=3, noise=0.3, device=DEVICE),
        "far": lambda: tiny_model(6, seed=8, layers=1, device=DEVICE),
        "ngram": lambda: "ngram",
    }
    params = SamplingParams(max_tokens=LENGTH, ignore_eos=True, **DISTRIBUTION[name])
    target = tiny_model(6, seed=3, device=DEVICE)
    engine = make_engine(target, drafts[draft](), policy or Alternating(), max_num_seqs=256, seed=11)
    for number in range(count):
        engine.add(PROMPT, with_seed(params, number) if seeded else params)
    counts: dict[tuple[int, ...], int] = {}
    for output in run(engine).values():
        key = tuple(output.outputs[0].token_ids)
        counts[key] = counts.get(key, 0) + 1
    assert engine.metrics.num_draft_tokens > count / 4
    assert p_value(enumerate_outputs(params), counts) > TOO_UNLIKELY


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("rate", [0.5, pytest.param(0.8, marks=needs_gpu)])
def test_synthetic_acceptance(kernels: Way, temperature: float, rate: float) -> None:
    count, length = (200, 60) if HAS_CUDA else (2, 8)
    engine = kernels.engine("far", "static:2", synthetic_acceptance=(rate,))
    params = SamplingParams(temperature=temperature, max_tokens=length)
    names = [engine.add([i % VOCAB, 3], params, trace=True) for i in range(count)]
    done = run(engine)
    traces = [done[name].metrics.trace or [] for name in names]
    stood = [[record.accepted > 0 for record in trace if record.drafted] for trace in traces]
    assert stats.binomtest(sum(map(sum, stood)), sum(map(len, stood)), rate).pvalue > TOO_UNLIKELY
    # A coin for every step, not one for every sequence.
    assert any(0 < sum(one) < len(one) for one in stood)


# Devices only


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_CUDA, reason="needs a CUDA device")
class TestOnCuda:
    @pytest.mark.parametrize("greedy", [True, False], ids=["greedy", "seeded"])
    def test_graphs_change_nothing(self, kernels: Way, greedy: bool) -> None:
        work = random_work(seed=8, greedy=greedy)
        engine = kernels.engine("close", "dsde", max_num_seqs=48)
        outputs = answers_together(engine, work, seed=9)
        assert engine.executor.passes.num_captured > 0
        assert engine.executor.drafter.passes.num_captured > 0
        kernels.monkeypatch.setattr(passes, "MOST_GRAPH_TOKENS", 0)
        plain = kernels.engine("close", "dsde", max_num_seqs=48)
        check_same(answers_together(plain, work, seed=9), outputs)
        assert plain.executor.passes.num_captured == plain.executor.drafter.passes.num_captured == 0

    def test_a_step_is_timed(self, kernels: Way) -> None:
        engine = kernels.engine("close")
        complete(engine, [[1, 2, 3]] * 4, SamplingParams(temperature=0, max_tokens=50))
        metrics = engine.metrics
        assert min(metrics.draft_s, metrics.target_s, metrics.accept_s, metrics.idle_s) > 0
        assert metrics.draft_s + metrics.target_s + metrics.accept_s + metrics.idle_s < 1.05 * metrics.step_s

    def test_half_precision_strays_only_where_two_tokens_are_about_as_likely(self) -> None:
        """Passes of other shapes add up in another order. A text may then leave the other's path, but not before two
        tokens were within rounding of each other, and up to there both saw the same probabilities."""
        shape: dict[str, Any] = {"vocab": 512, "width": 256, "layers": 4, "dtype": torch.bfloat16, "device": DEVICE}
        target, draft = tiny_model(seed=5, **shape), tiny_model(seed=5, noise=0.05, **shape)
        rng = random.Random(0)
        prompts = [[rng.randrange(512) for _ in range(rng.randrange(5, 80))] for _ in range(64)]
        params = SamplingParams(temperature=0, max_tokens=48, logprobs=3)
        plain = complete(make_engine(target, None), prompts, params)
        drafted = complete(make_engine(target, draft, "static:4"), prompts, params)
        num_same = 0
        for a, b in zip(plain, drafted, strict=True):
            one, other = a.outputs[0], b.outputs[0]
            pairs = enumerate(zip(one.token_ids, other.token_ids, strict=True))
            same = next((place for place, (x, y) in pairs if x != y), len(one.token_ids))
            num_same += same
            for place in range(same):
                token = one.token_ids[place]
                assert one.logprobs[place][token].logprob == pytest.approx(
                    other.logprobs[place][token].logprob, abs=0.15
                )
            if same < len(one.token_ids):
                rival = other.token_ids[same]
                entry = one.logprobs[same]
                best = entry[one.token_ids[same]].logprob
                assert rival in entry
                assert best - entry[rival].logprob < 0.15
        assert num_same >= 0.6 * 64 * 48

    def test_memory_does_not_grow(self, kernels: Way) -> None:
        engine = kernels.engine("close", "static:4", max_num_seqs=16)
        long = SamplingParams(temperature=0.8, max_tokens=120)
        for _ in range(2):
            complete(engine, [[i + 1, 2] for i in range(16)], long)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        num_steps = engine.metrics.num_steps
        while engine.metrics.num_steps < num_steps + 200:
            complete(engine, [[i + 1, 2] for i in range(16)], long)
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() <= before + (1 << 20)
