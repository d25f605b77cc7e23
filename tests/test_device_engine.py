"""The engine where draft, target and verdict are queued on a device: the same texts as on the host, whatever happens.

On a CUDA device with its kernels and graphs. Elsewhere the executor's own work is tested with plain kernels, with and
without graphs that are only played, and a few short texts are made by the real kernels in Triton's interpreter.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

pytest.importorskip("triton")

import plain_kernels
from dsde import RequestOutput, SamplingParams
from dsde.core.errors import OutOfMemory
from dsde.core.rng import derive_stream
from dsde.core.selection import VerifyBudget
from dsde.core.stops import Signal, Stop, StopAfter, StopBefore, StopByWorth, TokenSignal
from dsde.device import backend
from dsde.device.staging import Layout, Sheet
from dsde.drafting import device as drafting_device
from dsde.drafting import draft_store
from dsde.drafting import kernels as drafting_kernels
from dsde.drafting import ruling as drafting_ruling
from dsde.drafting.draft_store import DeviceProposals, IntArray
from dsde.drafting.foresight import Foresight
from dsde.drafting.referee import Referee
from dsde.drafting.ruling import ruling_sizes
from dsde.drafting.solo_kernels import SoloState
from dsde.engine import device_executor
from dsde.engine.clock import Timing
from dsde.engine.device_executor import DeviceExecutor, _Verification
from dsde.engine.engine import Engine
from dsde.engine.executor import HostExecutor, Seconds
from dsde.models import passes
from dsde.models.batch import BLOCK_SIZE
from dsde.models.decoder import Decoder
from dsde.policies import Auto, BatchView, Need, Outcome, Plan, Policy
from dsde.sampling.kernels import DrawMode
from dsde.verification.synthetic import kind_of
from test_lossless_distribution import (
    LENGTH,
    PROMPT,
    TOO_UNLIKELY,
    Changing,
    enumerate_outputs,
    p_value,
    sample_outputs,
    with_seed,
)
from test_lossless_greedy import answers_together, check_same
from tiny import complete, make_engine, run, tiny_model

VOCAB = 64
HAS_CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_CUDA else "cpu")
NUM_REQUESTS = 60 if HAS_CUDA else 16
needs_gpu = [pytest.mark.gpu, pytest.mark.skipif(not HAS_CUDA, reason="needs a CUDA device")]
WAYS = [pytest.param("kernels", marks=pytest.mark.gpu)] if HAS_CUDA else ["plain", "graphs"]
GREEDY = SamplingParams(temperature=0, max_tokens=24)
SETUPS = [("off", "none"), ("static:1", "far"), ("static:4", "close"), ("dsde", "close"), ("static:3", "ngram")]

Work = list[tuple[list[int], SamplingParams]]


@dataclass(slots=True)
class Way:
    """How engines of a test run."""

    name: str
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
        with self.host():
            return [self._once("host", *one) for one in work]

    def alone_on_device(self, work: Work) -> list[RequestOutput]:
        """The same on the device: seeds lead to other texts there."""
        return [self._once(self.name, *one) for one in work]

    def _once(self, name: str, prompt: list[int], params: SamplingParams) -> RequestOutput:
        """Many tests ask for the same."""
        key = name, tuple(prompt), repr(params)
        if key not in _ALONE:
            engine = make_engine(model("target", torch.device("cpu") if name == "host" else DEVICE), None)
            assert isinstance(engine.executor, HostExecutor if name == "host" else DeviceExecutor)
            _ALONE[key] = complete(engine, [prompt], params)[0]
        return _ALONE[key]


_ALONE: dict[tuple[str, tuple[int, ...], str], RequestOutput] = {}


def use_device(monkeypatch: pytest.MonkeyPatch) -> None:
    if not HAS_CUDA:
        monkeypatch.setattr(backend, "has_kernels", lambda _: True)


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Way:
    use_device(monkeypatch)
    if request.param != "kernels":
        plain_kernels.install(monkeypatch, with_graphs=request.param == "graphs")
    return Way(request.param, monkeypatch)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Way:
    """The real kernels, interpreted where there is no device: a second buys about three steps."""
    use_device(monkeypatch)
    return Way("kernels", monkeypatch)


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


def random_work(
    seed: int, greedy: bool, edited: float = 0.0, count: int = NUM_REQUESTS, own_lengths: bool = True
) -> Work:
    """Requests of all kinds; a share of them has logits that are edited by their own tokens, and a share draft as far
    as they themselves say."""
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
            speculation=rng.choice(["on", "on", "on", "off", rng.randrange(9)]) if own_lengths else "on",
            **options,
        )
        work.append((prompt, params))
    return work


def tokens_of(outputs: list[RequestOutput]) -> list[list[list[int]]]:
    return [[completion.token_ids for completion in output.outputs] for output in outputs]


class HeadStarts:
    """Counts what the device of an engine did before the host knew of it."""

    def __init__(self, engine: Engine) -> None:
        self.num_followed = 0
        """steps queued behind one whose verdict nobody had seen"""
        self.num_ahead = 0
        """first passes of a draft that were queued so"""
        self.num_used = 0
        """first tokens drawn so that a draft began with"""
        executor = engine.executor
        assert isinstance(executor, DeviceExecutor)
        self._follow = executor.follow
        executor.follow = self._count_follow  # type: ignore[method-assign]
        if (drafter := executor.drafter) is not None:
            self._read_ahead, self._take_ahead = drafter.read_ahead, drafter._take_ahead
            drafter.read_ahead, drafter._take_ahead = self._count_ahead, self._count_used  # type: ignore[method-assign]

    def _count_follow(self, flight: Any) -> Any:
        following = self._follow(flight)
        self.num_followed += following is not None
        return following

    def _count_ahead(self, *args: Any) -> bool:
        is_ahead = self._read_ahead(*args)
        self.num_ahead += is_ahead
        return is_ahead

    def _count_used(self, *args: Any) -> Any:
        rows = self._take_ahead(*args)
        self.num_used += int((rows >= 0).sum())
        return rows


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


@pytest.mark.parametrize("seed", range(10 if HAS_CUDA else 2))
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


@pytest.mark.parametrize("seed", range(8 if HAS_CUDA else 3))
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
        if names and rng.random() < 0.05 and engine.abort(name := rng.choice(names)) is not None:
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
    work = random_work(seed=7, greedy=greedy, count=48 if HAS_CUDA else 20)
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
    engine._release_slots()
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


# The draft that reads ahead of the host


class Fickle(Policy):
    """Random lengths, a third of them zero."""

    def __init__(self, seed: int, lengths: tuple[int, ...] = (0, 0, 1, 2, 4, 9)) -> None:
        self.rng = np.random.default_rng(seed)
        self.lengths = lengths

    def plan(self, batch: BatchView) -> Plan:
        lengths = np.minimum(self.rng.choice(self.lengths, len(batch.slots)), batch.rooms)
        return Plan(lengths, lengths.astype(float), np.ones(len(lengths), dtype=bool))


def test_only_the_first_draft_waits_for_the_host(way: Way) -> None:
    engine = way.engine("target", "static:3")
    starts = HeadStarts(engine)
    output = complete(engine, [[1, 2, 3]], SamplingParams(temperature=0, max_tokens=21))[0]
    # The prompt's step, then five with three accepted drafts: the draft of the first has nothing to follow on.
    assert output.metrics.num_steps == 6
    assert starts.num_ahead == 5
    assert starts.num_used == 4
    assert engine.metrics.num_accepted_tokens == engine.metrics.num_draft_tokens == 15
    assert starts.num_followed == 0


@pytest.mark.parametrize("greedy", [True, False], ids=["greedy", "seeded"])
@pytest.mark.parametrize("draft", ["target", "far"])
def test_drafts_that_pause_and_go_on(way: Way, draft: str, greedy: bool) -> None:
    """Newcomers, requests that send a step the host's way, lack of memory, a store that must grow: a first token drawn
    ahead is used by its own sequence in the very next step, or never."""
    way.monkeypatch.setattr(draft_store, "_FIRST_STORE_ROWS", 3)
    work = random_work(seed=11, greedy=greedy, edited=0.2)
    engine = way.engine(draft, Fickle(1), max_num_seqs=6, kv_cache_bytes=16 * block_bytes(draft), max_model_len=128)
    starts = HeadStarts(engine)
    expected = way.alone(work) if greedy else way.alone_on_device(work)
    check_same(expected, answers_together(engine, work, seed=12))
    assert starts.num_used > starts.num_ahead / 4 > 0
    assert engine.metrics.num_host_steps > 0
    if draft == "target" and not HAS_CUDA:
        assert engine.metrics.num_accepted_tokens == engine.metrics.num_draft_tokens > 0
    check_nothing_is_held(engine)


class Growing(Policy):
    """One token each while there are many, more for few."""

    def plan(self, batch: BatchView) -> Plan:
        lengths = np.minimum(np.full(len(batch.slots), 1 if batch.num_decoding > 10 else 5), batch.rooms)
        return Plan(lengths, lengths.astype(float), np.ones(len(lengths), dtype=bool))


def test_first_tokens_of_those_who_ended_take_room_in_the_store(way: Way) -> None:
    """Twenty of thirty end at once; the ten others, whose first tokens lie behind theirs, draft more than before."""
    work = [([i + 1], SamplingParams(temperature=0, max_tokens=9 if i < 20 else 24)) for i in range(30)]
    engine = way.engine("target", Growing(), max_num_seqs=32)
    names = [engine.add(*one) for one in work]
    done = run(engine)
    assert tokens_of([done[name] for name in names]) == tokens_of(way.alone(work))


@pytest.mark.parametrize("num_steps", [2, 3, 5])
def test_aborts_between_a_head_start_and_its_draft(way: Way, num_steps: int) -> None:
    rng = random.Random(num_steps)
    prompts = [random_prompt(rng, 10, 40) for _ in range(6)]
    engine = way.engine("target", "static:2", max_num_seqs=4)
    names = [engine.add(prompt, GREEDY) for prompt in prompts[:4]]
    for _ in range(num_steps):
        engine.step()
    for name in names[:2]:
        assert engine.abort(name) is not None
    names = names[2:] + [engine.add(prompt, GREEDY) for prompt in prompts[4:]]
    done = run(engine)
    assert tokens_of([done[name] for name in names]) == tokens_of(way.alone([(p, GREEDY) for p in prompts[2:]]))
    if not HAS_CUDA:
        assert engine.metrics.num_accepted_tokens == engine.metrics.num_draft_tokens
    check_nothing_is_held(engine)


def test_a_prompt_of_one_token_is_read_again(way: Way) -> None:
    work = [([token], SamplingParams(temperature=0, max_tokens=12)) for token in range(1, 9)]
    engine = way.engine("far", "static:2")
    outputs = complete(engine, [prompt for prompt, _ in work], work[0][1])
    assert tokens_of(outputs) == tokens_of(way.alone(work))


# Rules that stop drafts, and budgets


def rule_before(count: int) -> Stop:
    return StopBefore(Signal.ENTROPY, np.full(count, 2.6), True)


def rule_before_but_not_at_once(count: int) -> Stop:
    return StopBefore(Signal.TOP_PROB, np.full(count, 0.25), False, first_depth=1)


def rule_after(count: int) -> Stop:
    return StopAfter(Signal.MARGIN, np.full(count, 0.1), False)


def rule_after_token(count: int) -> Stop:
    return StopAfter(TokenSignal.TOKEN_PROB, np.full(count, 0.25), False)


def rule_after_all(count: int) -> Stop:
    return StopAfter(TokenSignal.TOTAL_LOG_PROB, np.full(count, -3.5), False)


def rule_by_worth(count: int) -> Stop:
    outlooks = np.linspace(0.5, 0.9, count) if count > 1 else np.full(count, 0.8)
    return StopByWorth(
        np.array([-0.8, 2.0, 1.0]), np.full(count, 1.7), outlooks, 0.25, 0.3, 0.6, np.full(count, 2), 0.1
    )


RULES = [rule_before, rule_before_but_not_at_once, rule_after, rule_after_token, rule_after_all, rule_by_worth]


class Ruled(Policy):
    """So many tokens, or until a rule or a budget ends it; remembers what it was told."""

    def __init__(
        self, *rules: Callable[[int], Stop] | None, length: int = 5, budget: int | None = None, curious: bool = True
    ) -> None:
        self.rules = itertools.cycle(rules)
        self.length, self.budget = length, budget
        self.needs = Need.TOKEN_PROB | Need.DRAFT_SIGNALS if curious else Need.NOTHING
        self.outcomes: list[Outcome] = []
        self.batches: list[BatchView] = []

    def plan(self, batch: BatchView) -> Plan:
        self.batches.append(batch)
        lengths = np.minimum(self.length, batch.rooms)
        rule = next(self.rules)
        plan = Plan(lengths, lengths.astype(float), np.ones(len(lengths), dtype=bool))
        plan.stop = None if rule is None else rule(len(lengths))
        plan.budget = None if self.budget is None else VerifyBudget(Signal.TOP_PROB, self.budget)
        return plan

    def observe(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)


def check_same_outcomes(found: list[Outcome], expected: list[Outcome]) -> None:
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        for name in ("slots", "drafted", "accepted", "num_draft_passes", "num_drafted"):
            np.testing.assert_array_equal(getattr(a, name), getattr(b, name), name)
        for name in ("token_probs", "draft_signals"):
            np.testing.assert_allclose(getattr(a, name), getattr(b, name), rtol=1e-3, atol=1e-4, err_msg=name)


SEVERAL: dict[str, tuple[tuple[Callable[[int], Stop] | None, ...], int | None, str]] = {
    **{rule.__name__[5:]: ((rule,), None, "close") for rule in RULES},
    "a rule at times": ((None, rule_before), None, "close"),
    "a budget": ((None,), 7, "close"),
    "rules and a budget": (tuple(RULES), 9, "far"),
    "nothing to look at": (tuple(RULES), 5, "ngram"),
}


@pytest.mark.parametrize(("rules", "budget", "draft"), SEVERAL.values(), ids=SEVERAL)
def test_drafts_stop_where_they_do_on_the_host(
    way: Way, rules: tuple[Callable[[int], Stop] | None, ...], budget: int | None, draft: str
) -> None:
    """Lengths, passes, signals: all that a policy is told; and the text."""
    work = random_work(21, greedy=True, count=30 if HAS_CUDA else 6)
    # Ends that come as a surprise would let the two engines make different batches.
    work = [(prompt, replace(params, max_tokens=20, stop_token_ids=[], n=1)) for prompt, params in work]
    way.monkeypatch.setattr(Referee, "has_decided", lambda *_: False)
    way.monkeypatch.setattr(device_executor, "_MOST_BY_HEART", 0)
    # The host never makes a pass for nobody, and hears of every decision.
    way.monkeypatch.setattr(Foresight, "is_sure", lambda *_: False)
    way.monkeypatch.setattr(Foresight, "is_sure_of_end", lambda *_: False)
    way.monkeypatch.setattr(draft_store, "_FIRST_STORE_ROWS", 3)
    outcomes, texts = [], []
    for context in (nullcontext, way.host):
        with context():
            device = DEVICE if context is nullcontext else torch.device("cpu")
            policy = Ruled(*rules, budget=budget, curious=None not in rules or budget is not None)
            engine = make_engine(model("target", device), model(draft, device), policy, max_num_seqs=5)
            assert isinstance(engine.executor, DeviceExecutor) == (context is nullcontext)
            ids = [engine.add(*one) for one in work]
            done = run(engine)
            texts.append(tokens_of([done[name] for name in ids]))
            outcomes.append(policy.outcomes)
            assert engine.metrics.num_host_steps == 0
            assert engine.metrics.num_accepted_tokens > 0 or draft == "far"
            if draft != "ngram":
                assert engine.metrics.num_stopped + engine.metrics.num_cut > 0
            check_nothing_is_held(engine)
    assert texts[0] == texts[1] == tokens_of(way.alone(work))
    check_same_outcomes(*outcomes)


@pytest.mark.parametrize("seed", range(4, 12 if HAS_CUDA else 6))
def test_a_stopped_draft_that_is_the_target_is_never_rejected(way: Way, seed: int) -> None:
    """Rules that come and go, those who ride along, first tokens dropped after they were drawn ahead: one hole in the
    draft's KV and a token would fall."""
    rng = random.Random(seed)
    way.monkeypatch.setattr(draft_store, "_FIRST_STORE_ROWS", 3)
    way.monkeypatch.setattr(Referee, "has_decided", lambda *_: rng.random() < 0.5)
    way.monkeypatch.setattr(Foresight, "is_sure", lambda *_: rng.random() < 0.5)
    way.monkeypatch.setattr(Foresight, "is_sure_of_end", lambda *_: rng.random() < 0.2)
    work = random_work(seed + 30, greedy=seed % 2 == 0, count=60 if HAS_CUDA else 12, edited=0.1)
    expected = way.alone(work) if seed % 2 == 0 else way.alone_on_device(work)
    rules = [*RULES, *RULES, None, None]
    rng.shuffle(rules)
    read_ahead = drafting_device.DeviceDrafter.read_ahead
    way.monkeypatch.setattr(
        drafting_device.DeviceDrafter, "read_ahead", lambda *args: rng.random() < 0.7 and read_ahead(*args)
    )
    policy = Ruled(*rules, length=rng.choice([3, 6]), budget=rng.choice([None, 8]))
    engine = way.engine(
        "target",
        policy,
        kv_cache_bytes=rng.choice([12, 30]) * block_bytes("target"),
        max_num_seqs=rng.choice([3, 8]),
        max_num_batched_tokens=rng.choice([3, 17, 200]),
        max_model_len=128,
    )
    starts = HeadStarts(engine)
    check_same(expected, answers_together(engine, work, seed))
    assert starts.num_used > 0
    rejected = engine.metrics.num_draft_tokens - engine.metrics.num_accepted_tokens
    assert rejected <= (engine.metrics.num_draft_tokens // 1000 if HAS_CUDA else 0)
    assert engine.metrics.num_draft_tokens > 0
    check_nothing_is_held(engine)


NAMED = [
    "svip:0.5",
    "adaedl",
    "confidence",
    "ddd:-1.5",
    "margin:0.1",
    "gammatune+:0.2",
    "tetris:3",
    "svip:0.5|tetris:3",
    "adaserve:3",
    "svip:0.5|adaserve:3",
    "adaptiveverify:4",
    "tapout:[static:3,svip:0.5,confidence]",
]


@pytest.mark.parametrize("policy", NAMED)
def test_no_stop_sends_a_step_to_the_host(way: Way, policy: str) -> None:
    params = SamplingParams(temperature=0.9, seed=4, max_tokens=12)
    work = [([i + 1, 7, 3], params) for i in range(3)]
    engine = way.engine("close", policy)
    check_same(way.alone_on_device(work), answers_together(engine, work, seed=42))
    assert engine.metrics.num_host_steps == 0
    assert engine.metrics.num_stopped + engine.metrics.num_cut > 0


@pytest.mark.parametrize("rule", RULES)
def test_a_pass_that_waited_for_no_decision_changes_nothing_but_their_number(
    way: Way, rule: Callable[[int], Stop]
) -> None:
    """Drafts end where they would have; a pass that turns out to be for nobody is counted, and not waited for."""
    params = SamplingParams(temperature=0, max_tokens=24)
    work = [([i + 1, 7, 3], params) for i in range(4)]
    way.monkeypatch.setattr(device_executor, "_MOST_BY_HEART", 0)
    patient, bold = Ruled(rule), Ruled(rule)
    wait, waits = Referee.wait, []
    way.monkeypatch.setattr(Referee, "wait", lambda *args: waits.append(1) or wait(*args))
    for policy, is_sure in ((patient, False), (bold, True)):
        way.monkeypatch.setattr(Foresight, "is_sure", lambda *_, sure=is_sure: sure)
        way.monkeypatch.setattr(Foresight, "is_sure_of_end", lambda *_: False)
        check_same(way.alone(work), answers_together(way.engine("close", policy), work, seed=42))
        waits.append(0)
    num_patient = waits.index(0)
    assert len(waits) == 2 * (num_patient + 1)
    assert len(patient.outcomes) == len(bold.outcomes)
    num_more = 0
    for a, b in zip(patient.outcomes, bold.outcomes, strict=True):
        np.testing.assert_array_equal(a.drafted, b.drafted)
        np.testing.assert_array_equal(a.accepted, b.accepted)
        assert 0 <= b.num_draft_passes - a.num_draft_passes <= 1
        num_more += b.num_draft_passes - a.num_draft_passes
    assert num_more > 0


def test_only_what_is_all_but_sure_is_not_waited_for() -> None:
    """Whether somebody goes on is learnt for every number of those expected to, and unlearnt as well."""
    foresight = Foresight()
    assert not any(foresight.is_sure(count) for count in range(40))
    for _ in range(200):
        foresight.learn(2, True)
        foresight.learn(0, False)
        foresight.learn(30, True)
    assert [foresight.is_sure(count) for count in (0, 1, 2, 3, 8, 50)] == [False, False, True, False, True, True]
    foresight.learn(2, False)
    foresight.learn(2, False)
    assert not foresight.is_sure(2)
    new = Foresight()
    for _ in range(16):  # a dozen short drafts are enough to go by
        new.learn(1, True)
        new.learn_end(False, 0)
    assert new.is_sure(1)
    assert new.is_sure_of_end(0, 0)
    new.learn(1, False)
    assert not new.is_sure(1)
    rng = random.Random(0)
    share = {}
    for chance in (0.01, 0.1):
        foresight, found = Foresight(), []
        for _ in range(4000):
            found.append(foresight.is_sure(1))
            foresight.learn(1, rng.random() >= chance)
        share[chance] = sum(found[400:]) / 3600
    assert share[0.01] > 0.8
    assert share[0.1] < 0.2


def test_the_host_prepares_for_an_end_that_is_likely_or_while_it_has_time() -> None:
    foresight = Foresight()
    assert foresight.is_worth_preparing(1, 0)  # a toss-up
    for _ in range(40):
        foresight.learn(1, True)
        foresight.learn(1, True)
        foresight.learn(1, False)
    foresight.learn_prepared(1e-4, True, 1)
    for _ in range(8):  # a third of all end there, and it has no time before first tokens are decided on
        foresight.learn_prepared(1e-4, False, 0)
        foresight.learn_prepared(1e-4, True, 1)
    assert [foresight.is_worth_preparing(1, depth) for depth in (0, 1, 2)] == [False, True, True]
    assert foresight.is_worth_preparing(2, 0)  # of whom nothing is known
    for _ in range(40):  # it hears of better times while it prepares nothing, and of worse ones
        foresight.learn_waited(2e-4, 0)
        foresight.learn_waited(5e-5, 1)
    assert [foresight.is_worth_preparing(1, depth) for depth in (0, 1)] == [True, False]
    for _ in range(40):
        foresight.learn(1, False)
    assert foresight.is_worth_preparing(1, 1)  # then it has to be done anyway


def test_a_draft_that_is_all_but_sure_to_be_over_waits_for_nothing(way: Way) -> None:
    """It ends where it is expected to, and what was decided on it is heard with the next one."""
    params = SamplingParams(temperature=0, max_tokens=24)
    work = [([i + 1, 7, 3], params) for i in range(4)]

    def rule(count: int) -> Stop:
        """Two tokens are usual, and everybody would go on for ever."""
        usual, outlooks = np.full(count, 2), np.full(count, 0.9)
        return StopByWorth(np.zeros(3), np.full(count, 50.0), outlooks, 0.01, 0.01, 0.01, usual, 0.0)

    learnt: list[bool] = []
    way.monkeypatch.setattr(Foresight, "is_sure", lambda *_: True)
    way.monkeypatch.setattr(Foresight, "is_sure_of_end", lambda _, count, depth: count == 0)
    way.monkeypatch.setattr(Foresight, "learn_end", lambda _, is_surprise, depth: learnt.append(is_surprise))
    policy = Ruled(rule)
    engine = way.engine("close", policy)
    engine.executor.makes_solos = False  # type: ignore[attr-defined]
    check_same(way.alone(work), answers_together(engine, work, seed=42))
    drafted = np.concatenate([outcome.drafted for outcome in policy.outcomes])
    assert set(drafted.tolist()) <= {0, 1, 2}
    assert (drafted == 2).sum() > len(drafted) // 2
    # Heard of nearly every one: it would have gone on.
    assert len(learnt) > 0.8 * len(policy.outcomes)
    assert all(learnt)


def test_a_draft_from_rest_is_told_from_one_that_goes_on(way: Way) -> None:
    policy = Ruled(None, rule_by_worth, length=2)
    policy.plan = lambda batch, plan=policy.plan: plan(batch) if len(policy.outcomes) % 4 else Plan.wanting(0, batch)  # type: ignore[method-assign]
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    check_same(way.alone([([1, 2], params)]), answers_together(way.engine("close", policy), [([1, 2], params)], seed=1))
    drafts = [outcome.num_draft_passes > 0 for outcome in policy.outcomes]
    assert 2 < sum(drafts) < len(drafts) - 2
    for outcome, was_drafting, is_drafting in zip(policy.outcomes[1:], drafts, drafts[1:], strict=False):
        if is_drafting:
            assert outcome.is_resumed != was_drafting


def test_whether_drafts_end_as_expected_is_learnt() -> None:
    """Behind first tokens and behind later ones apart."""
    foresight = Foresight()
    assert not foresight.is_sure_of_end(0, 0)
    for _ in range(100):
        foresight.learn_end(False, 0)
        foresight.learn_end(True, 3)
    assert foresight.is_sure_of_end(0, 0)
    assert not foresight.is_sure_of_end(1, 0)
    assert not foresight.is_sure_of_end(0, 1)
    for _ in range(4):
        foresight.learn_end(True, 0)
    assert not foresight.is_sure_of_end(0, 0)


@pytest.mark.parametrize("usual", [1, 2])
def test_a_rule_that_changes_is_noticed_though_nobody_waits_for_it(way: Way, usual: int) -> None:
    """First all drafts end where they are expected to; then everybody would go on, and soon does."""

    def rule(count: int) -> Stop:
        usuals, outlooks = np.full(count, usual), np.full(count, 0.99)
        dearer = 0.0 if len(policy.outcomes) > 150 else 2.0
        return StopByWorth(np.zeros(3), np.full(count, 50.0), outlooks, 0.01, 0.01, 0.01, usuals, dearer)

    policy = Ruled(rule, length=4)
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    engine = way.engine("target", policy, max_num_seqs=1)
    answers_together(engine, [([i + 1, 2], params) for i in range(20)], seed=1)
    drafted = [int(outcome.drafted[0]) for outcome in policy.outcomes if outcome.num_draft_passes]
    assert np.mean(np.array(drafted[:140]) == usual) > 0.9
    assert engine.executor.drafter.foresight.is_sure_of_end(0, usual - 1) is False  # type: ignore[attr-defined]
    assert np.mean(np.array(drafted[-40:]) == 4) > 0.8


@pytest.mark.parametrize("rule", [rule_before, rule_before_but_not_at_once, rule_after])
@pytest.mark.parametrize("length", [1, 2, 3])
def test_rules_that_expect_nothing_are_obeyed_to_the_letter(way: Way, rule: Callable[[int], Stop], length: int) -> None:
    """Whatever was learnt of how drafts end."""
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    work = [([i + 1, 7, 3], params) for i in range(2)]
    found = []
    for is_sure in (False, True):
        way.monkeypatch.setattr(Foresight, "is_sure_of_end", lambda *_, sure=is_sure: sure)
        policy = Ruled(rule, length=length)
        check_same(way.alone(work), answers_together(way.engine("close", policy), work, seed=42))
        found.append([outcome.drafted.tolist() for outcome in policy.outcomes])
    assert found[0] == found[1]


@pytest.mark.parametrize("rule", [rule_before, rule_by_worth])
def test_what_was_foreseen_is_used(way: Way, rule: Callable[[int], Stop]) -> None:
    """A single draft under a rule ends in few ways, and verification was prepared for the right one nearly always."""
    engine = way.engine("close", Ruled(rule))
    executor = engine.executor
    assert isinstance(executor, DeviceExecutor)
    executor.makes_solos = False
    way.monkeypatch.setattr(Referee, "has_decided", lambda *_: False)
    begin, begun = _Verification.begin, []

    def note(self: _Verification, lengths: Any) -> None:
        begin(self, lengths)
        begun.append(self)

    way.monkeypatch.setattr(_Verification, "begin", note)
    work = [([3, 1, 4], SamplingParams(temperature=0, max_tokens=40))]
    check_same(way.alone(work), answers_together(engine, work, seed=0))
    # As soon as the draft was over, before anything else was done with it.
    was_foreseen = [one._prepared is not None and one._prepared.read is not None for one in begun]
    assert len(begun) >= engine.metrics.num_steps - 3
    assert sum(was_foreseen) > 0.7 * len(begun)
    # What was prepared before the drafts moved would look for them where they were.
    last, prepared = begun[-1], begun[-1]._prepared
    assert last._is_for(prepared, prepared.lengths)
    executor.drafts.make_room(1)
    assert not last._is_for(prepared, prepared.lengths)


@pytest.mark.parametrize("num_moves", [0, 1])
def test_what_was_foreseen_is_not_used_for_something_else(num_moves: int) -> None:
    """Neither for drafts of other lengths nor for those that have moved."""
    prepared: list[IntArray] = []

    def prepare(proposals: DeviceProposals) -> Any:
        prepared.append(proposals.lengths)
        return SimpleNamespace(lengths=proposals.lengths, num_moves=0)

    started: list[Any] = []
    one, other = (DeviceProposals(np.array([length]), np.zeros((1, length), np.int64)) for length in (1, 2))
    verification = _Verification(prepare, started.append, SimpleNamespace(num_moves=num_moves), True)  # type: ignore[arg-type]
    verification.prepare(one)
    verification.begin(other.lengths)
    assert not started
    verification.begin(one.lengths)
    assert len(started) == 1 - num_moves
    verification.of(one)
    assert len(prepared) == 1 + num_moves
    verification.of(other)
    assert prepared[-1].tolist() == [2]


def test_a_stopped_first_token_was_read_ahead(way: Way) -> None:
    """Who drops its first token has read all the same, and reads ahead again."""

    def never_draft(count: int) -> Stop:
        return StopBefore(Signal.ENTROPY, np.full(count, -1.0), True)

    policy = Ruled(never_draft)
    engine = way.engine("target", policy)
    starts = HeadStarts(engine)
    complete(engine, [[1, 2, 3], [4, 5]], SamplingParams(temperature=0, max_tokens=12))
    assert engine.metrics.num_draft_tokens == 0
    assert starts.num_used >= 2 * 8
    assert all(outcome.num_draft_passes == 1 for outcome in policy.outcomes[1:-1])
    assert sum(outcome.num_catch_up_tokens for outcome in policy.outcomes) == 5


class Foreseeing(Policy):
    """Drafts nothing; keeps what it was told of the next step, and what that was."""

    def __init__(self) -> None:
        self.coming: BatchView | None = None
        self.found: list[tuple[BatchView | None, BatchView]] = []
        self.num_resting = 0

    def plan(self, batch: BatchView) -> Plan:
        self.found.append((self.coming, batch))
        self.coming = None
        return replace(Plan.wanting(0, batch), num_resting=self.num_resting)

    def settle(self, coming: BatchView | None = None, is_pressed: bool = False) -> None:
        self.coming = coming or self.coming


def test_a_policy_knows_who_is_coming_while_prompts_are_read(way: Way) -> None:
    """Whoever begins to decode is announced with the step that ends its prompt, and what its draft would have to read
    first; not so where somebody fixes its own length, or reads on."""
    policy = Foreseeing()
    engine = way.engine("close", policy, max_num_seqs=3, max_num_batched_tokens=32)
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    engine.add([1, 2, 3], params)
    engine.step()
    engine.add([4, 5, 6, 7], params)
    engine.step()
    engine.add(list(range(1, 50)), replace(params, speculation=2))
    while engine.has_work:
        engine.step()
    announced = [(coming, batch) for coming, batch in policy.found if coming is not None]
    assert [batch.slots.tolist() for _, batch in announced] == [[0], [0, 1]]
    for coming, batch in announced:
        np.testing.assert_array_equal(coming.slots, batch.slots)
        np.testing.assert_array_equal(coming.rooms, batch.rooms)
        assert coming.num_decoding == batch.num_decoding
        assert coming.num_missed is not None
        assert batch.num_missed is not None
        assert (np.abs(coming.num_missed - batch.num_missed) <= 1).all()


def test_a_policy_knows_who_takes_the_place_of_another(way: Way) -> None:
    """Although others wait: they could not run as long as nobody ends."""
    policy = Foreseeing()
    engine = way.engine("close", policy, max_num_seqs=2)
    params = SamplingParams(temperature=0, ignore_eos=True)
    for number in range(4):
        engine.add([1 + number, 2, 3], replace(params, max_tokens=8 + 5 * number))
    num_waiting = []
    while engine.has_work:
        engine.step()
        num_waiting += [len(engine.scheduler.waiting)] if policy.coming is not None else []
    announced = [(coming, batch) for coming, batch in policy.found if coming is not None]
    # A slot that was given back is not the next one's.
    assert [sorted(batch.slots) for _, batch in announced] == [[0, 1], [1, 2], [0, 2]]
    assert num_waiting == [1, 0], "of the first nobody hears between two steps"
    for coming, batch in announced:
        np.testing.assert_array_equal(coming.slots, batch.slots)
        np.testing.assert_array_equal(coming.rooms, batch.rooms)


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("by_token", [False, True])
def test_a_policy_knows_who_is_left_before_a_rest_is_cut_short(way: Way, by_token: bool, waits: bool) -> None:
    """Whether somebody ends by length, which is known, or by a token, after which one more step is under way; not where
    another one waits for the place."""
    policy = Foreseeing()
    policy.num_resting = 100
    engine = way.engine("close", policy, max_num_seqs=3)
    whole = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    prompts = [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    text = complete(engine, prompts, whole)[1].outputs[0].token_ids  # and a step can be followed from now on
    place = next(i for i in range(6, 24) if text[i] not in text[:i])
    short = replace(whole, max_tokens=place + 1)
    if by_token:
        short = replace(whole, stop_token_ids=[text[place]])
    for prompt, params in zip(prompts, (whole, short, whole), strict=True):
        engine.add(prompt, params)
    policy.found.clear()
    while not policy.found or policy.found[-1][1].slots.size != 3:
        engine.step()
    num_before = len(policy.found)
    if waits:
        engine.add([9, 8, 7], whole)
    while len(policy.found) == num_before:
        engine.step()
    coming, batch = policy.found[-1]
    if waits:
        assert coming is None
        return
    assert coming is not None
    np.testing.assert_array_equal(coming.slots, batch.slots)
    np.testing.assert_array_equal(coming.rooms, batch.rooms)
    assert coming.num_decoding == batch.num_decoding == 2


@pytest.mark.parametrize(("idle_s", "is_pressed"), [(0.0, False), (1e-3, True)])
def test_a_policy_is_told_that_the_device_waits_for_the_host(way: Way, idle_s: float, is_pressed: bool) -> None:
    """As long as it did before the last step that drafted, the first one of a request apart."""
    for name in ("seconds", "seconds_alone"):
        way.monkeypatch.setattr(Timing, name, lambda *_: Seconds(draft=1e-3, target=1e-3, idle=idle_s))
    told: list[bool] = []
    policy = Ruled(rule_by_worth)
    way.monkeypatch.setattr(policy, "settle", lambda coming, is_pressed: told.append(is_pressed), raising=False)
    engine = way.engine("close", policy)
    for _ in range(3):  # the first times passes are cold
        complete(engine, [[1, 2, 3]], SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))
    assert told[:2] == [False, False]
    assert told[-1] == is_pressed


# Steps that follow on one that nobody has seen


@pytest.mark.parametrize("greedy", [True, False], ids=["greedy", "seeded"])
@pytest.mark.parametrize("num_blocks", [200, 8], ids=["roomy", "tight"])
def test_steps_that_follow_unseen(way: Way, num_blocks: int, greedy: bool) -> None:
    """Stop tokens in mid-air, limits of length, arrivals, requests that want to see logits, lack of memory."""
    work = random_work(seed=13, greedy=greedy, own_lengths=False)
    memory = num_blocks * block_bytes("none")
    engine = way.engine("none", "off", kv_cache_bytes=memory, max_model_len=96, max_num_seqs=3)
    starts = HeadStarts(engine)
    expected = way.alone(work) if greedy else way.alone_on_device(work)
    check_same(expected, answers_together(engine, work, seed=14))
    assert starts.num_followed > 0
    assert num_blocks > 8 or engine.metrics.num_preemptions > 0
    check_nothing_is_held(engine)


def test_almost_all_steps_follow_unseen(way: Way) -> None:
    engine = way.engine("none", "off")
    starts = HeadStarts(engine)
    complete(engine, [[1, 2, 3], [4]], SamplingParams(temperature=0, max_tokens=40))
    # Not those of the prompts, nor where a shape is new, a graph must be captured, a block begins or an end is near.
    assert starts.num_followed >= 40 - 10
    assert engine.metrics.num_steps == 40


class Measuring(Policy):
    def __init__(self) -> None:
        self.outcomes: list[Outcome] = []

    def plan(self, batch: BatchView) -> Plan:
        return Plan.wanting(2, batch)

    def observe(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)


def test_a_policy_is_not_told_of_seconds_that_are_not_typical(way: Way) -> None:
    """A shape is met, captured, and from then on as fast as it will be."""
    policy = Measuring()
    engine = way.engine("target", policy)
    complete(engine, [[1, 2, 3]], SamplingParams(temperature=0, max_tokens=40))
    is_measured = [outcome.verify_s > 0 and outcome.draft_s > 0 for outcome in policy.outcomes]
    has_graphs = engine.executor.passes.num_captured > 0  # type: ignore[attr-defined]
    assert has_graphs == (way.name != "plain")
    assert is_measured[:2] == [not has_graphs] * 2
    assert all(is_measured[4:-1])


class Resting(Policy):
    """Drafts now and then, and says for how long it will not."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.num_planned = self.num_observed = 0

    def plan(self, batch: BatchView) -> Plan:
        self.num_planned += 1
        drafts = self.rng.random() < 0.5
        plan = Plan.wanting(self.rng.choice([1, 2, 5], len(batch.slots)) if drafts else 0, batch)
        plan.num_resting = 0 if drafts else int(self.rng.integers(12))
        return plan

    def observe(self, outcome: Outcome) -> None:
        self.num_observed += 1


@pytest.mark.parametrize("greedy", [True, False], ids=["greedy", "seeded"])
@pytest.mark.parametrize("num_blocks", [200, 16], ids=["roomy", "tight"])
def test_steps_of_a_rest_follow_unseen(way: Way, num_blocks: int, greedy: bool) -> None:
    """And drafts go on after it, whoever joins or ends meanwhile."""
    work, policy = random_work(seed=15, greedy=greedy), Resting(seed=16)
    engine = way.engine("target", policy, kv_cache_bytes=num_blocks * block_bytes("target"), max_num_seqs=3)
    starts = HeadStarts(engine)
    expected = way.alone(work) if greedy else way.alone_on_device(work)
    check_same(expected, answers_together(engine, work, seed=17))
    assert starts.num_followed > 0
    assert engine.metrics.num_draft_tokens > 0
    # What follows unseen is not planned, but observed.
    assert policy.num_observed > policy.num_planned
    check_nothing_is_held(engine)


def test_a_rest_lasts_as_long_as_was_said(way: Way) -> None:
    policy = Resting(seed=18)
    policy.plan = lambda batch: replace(Plan.wanting(0, batch), num_resting=4)  # type: ignore[method-assign]
    engine = way.engine("target", policy)
    starts = HeadStarts(engine)
    complete(engine, [[1, 2, 3]], SamplingParams(temperature=0, max_tokens=41))
    assert starts.num_followed <= 4 * 40 // 5
    assert starts.num_followed > 20


def test_what_a_stop_token_cuts_off_is_dropped(way: Way) -> None:
    prompt, params = [3, 1, 4, 1, 5], SamplingParams(temperature=0, max_tokens=40)
    text = way.alone([(prompt, params)])[0].outputs[0].token_ids
    place = next(i for i in range(12, 40) if text[i] not in text[:i])
    stops = SamplingParams(temperature=0, max_tokens=40, stop_token_ids=[text[place]])
    engine = way.engine("none", "off")
    name, other = engine.add(prompt, stops), engine.add([9, 9], params)
    done: dict[str, RequestOutput] = {}
    num_in_air = 0
    while name not in done:
        num_in_air = len(engine._flights)
        done.update((output.request_id, output) for output in engine.step().finished)
    assert num_in_air == 2
    done |= run(engine)
    assert tokens_of([done[name], done[other]]) == [[text[: place + 1]], *tokens_of(way.alone([([9, 9], params)]))]
    check_nothing_is_held(engine)


@pytest.mark.parametrize("who", ["one", "all"])
def test_aborts_with_two_steps_in_the_air(way: Way, who: str) -> None:
    params = SamplingParams(temperature=0, max_tokens=30)
    engine = way.engine("none", "off", kv_cache_bytes=40 * block_bytes("none"))
    names = [engine.add([i + 1, 5], params) for i in range(3)]
    while len(engine._flights) < 2:
        engine.step()
    for name in names[: 1 if who == "one" else 3]:
        assert engine.abort(name) is not None
    # Takes over slot and blocks while the device still works for those who left.
    names.append(engine.add([8] * 30, params))
    done = run(engine)
    kept = [1, 2, 3] if who == "one" else [3]
    work = [([i + 1, 5], params) if i < 3 else ([8] * 30, params) for i in kept]
    assert tokens_of([done[names[i]] for i in kept]) == tokens_of(way.alone(work))
    check_nothing_is_held(engine)


def test_nobody_is_left_with_two_steps_in_the_air(way: Way) -> None:
    engine = way.engine("none", "off")
    name = engine.add([1, 2], GREEDY)
    while len(engine._flights) < 2:
        engine.step()
    engine.abort(name)
    assert engine.step().chunks == []
    assert not engine._flights
    assert not engine.has_work
    assert tokens_of(complete(engine, [[4, 5]], GREEDY)) == tokens_of(way.alone([([4, 5], GREEDY)]))


def test_logits_that_are_asked_for_are_not_overwritten(way: Way) -> None:
    work = [([1, 2], SamplingParams(temperature=0, max_tokens=12, logprobs=2)), ([3], GREEDY)]
    engine = way.engine("none", "off")
    starts = HeadStarts(engine)
    check_same(way.alone(work), answers_together(engine, work, seed=0))
    assert starts.num_followed > 0
    engine = way.engine("none", "off")
    starts = HeadStarts(engine)
    check_same(way.alone(work[:1]), answers_together(engine, work[:1], seed=0))
    assert starts.num_followed == 0


@pytest.mark.parametrize("num_tokens", [14, 120, 250], ids=["block", "table", "wider table"])
def test_contexts_that_outgrow_their_table(way: Way, num_tokens: int) -> None:
    params = SamplingParams(temperature=0, max_tokens=24)
    work = [([(7 * i) % VOCAB for i in range(num_tokens)], params), ([2, 3], params)]
    engine = way.engine("none", "off")
    assert tokens_of(complete(engine, [prompt for prompt, _ in work], params)) == tokens_of(way.alone(work))


@pytest.mark.parametrize("logprobs", [None, 1], ids=["following", "one by one"])
@pytest.mark.parametrize("max_model_len", [95, 96, 97])
def test_up_to_the_last_token_that_may_be(way: Way, max_model_len: int, logprobs: int | None) -> None:
    """Memory to spare is not for tokens that can never be."""
    work = [([1] * 60, SamplingParams(temperature=0, max_tokens=max_model_len - 60, logprobs=logprobs))]
    engine = way.engine("none", "off", max_model_len=max_model_len)
    check_same(way.alone(work), complete(engine, [work[0][0]], work[0][1]))


def test_a_request_may_draft_where_the_policy_does_not(way: Way) -> None:
    drafts = SamplingParams(temperature=0, max_tokens=10, speculation=2)
    work = [([1, 2], SamplingParams(temperature=0, max_tokens=40)), ([3, 4, 5], drafts)]
    engine = way.engine("target", "off")
    starts = HeadStarts(engine)
    first = engine.add(*work[0])
    for _ in range(8):
        engine.step()
    num_followed = starts.num_followed
    assert num_followed > 0
    second = engine.add(*work[1])
    done: dict[str, RequestOutput] = {}
    while second not in done:
        done.update((output.request_id, output) for output in engine.step().finished)
    done |= run(engine)
    assert starts.num_followed > num_followed
    assert starts.num_used > 0
    assert done[second].metrics.num_accepted_tokens == done[second].metrics.num_draft_tokens > 0
    assert done[first].metrics.num_draft_tokens == 0
    assert tokens_of([done[first], done[second]]) == tokens_of(way.alone(work))


@pytest.mark.parametrize("part", ["queued", "landing"])
def test_a_failure_with_two_steps_in_the_air(way: Way, part: str) -> None:
    work = [([i + 1, 9, 8], SamplingParams(temperature=0, max_tokens=12 + i)) for i in range(4)]
    engine = way.engine("none", "off")
    names = [engine.add(*one) for one in work]
    done: dict[str, RequestOutput] = {}
    while len(engine._flights) < 2:
        done.update((output.request_id, output) for output in engine.step().finished)

    def fail(_: Any) -> Any:
        raise RuntimeError("out of luck")

    with way.monkeypatch.context() as patch:
        if part == "queued":
            patch.setattr(engine.executor.passes, "repeat", fail)
        else:
            engine._flights[0].flight.finish = fail  # type: ignore[attr-defined]
        with pytest.raises(RuntimeError, match="out of luck"):
            engine.step()
    assert not engine._flights
    done |= run(engine)
    assert tokens_of([done[name] for name in names]) == tokens_of(way.alone(work))
    check_nothing_is_held(engine)


# The kernels in between


def random_words(rng: np.random.Generator, *shape: int, low: int = 0, high: int = 1000) -> torch.Tensor:
    return torch.from_numpy(rng.integers(low, high, shape, dtype=np.int32))


def check_same_arrays(kernel: Any, plain: Any, arrays: dict[str, torch.Tensor], *others: Any) -> None:
    """Also that nothing else is written."""
    found = {name: array.to(DEVICE, copy=True) for name, array in arrays.items()}
    kernel(found, *(other.to(DEVICE) if isinstance(other, torch.Tensor) else other for other in others))
    plain(arrays, *others)
    for name, array in arrays.items():
        assert torch.equal(found[name].cpu(), array), name


@pytest.mark.parametrize("seed", range(200 if HAS_CUDA else 8))
def test_advance_kernel(seed: int) -> None:
    rng = np.random.default_rng(seed)
    longest, num_judged, table_width = int(rng.integers(1, 9)), int(rng.integers(1, 12)), int(rng.integers(2, 9))
    count = int(rng.integers(1, num_judged + 1))
    num_seqs = count + int(rng.integers(4))
    emitted_start = num_judged + int(rng.integers(5))
    accepted = rng.integers(0, longest + 1, num_judged)
    verdict = random_words(rng, emitted_start + num_judged * (longest + 1))
    verdict[:num_judged] = torch.from_numpy(accepted)
    emitted = verdict[emitted_start:].view(num_judged, -1)
    emitted[torch.arange(longest + 1) > torch.from_numpy(accepted)[:, None]] = -1
    judged = torch.full((num_seqs,), -1, dtype=torch.int32)
    judged[:count] = torch.from_numpy(np.sort(rng.choice(num_judged, count, replace=False)))
    num_tokens = random_words(rng, num_seqs, low=1, high=table_width * BLOCK_SIZE - longest)
    num_tokens[0] = rng.choice([1, BLOCK_SIZE - 1, BLOCK_SIZE, int(num_tokens[0])])
    arrays = {
        "emitted_start": torch.tensor([emitted_start], dtype=torch.int32),
        "emitted_width": torch.tensor([longest + 1], dtype=torch.int32),
        "judged": judged,
        "num_tokens": num_tokens,
        "last_tokens": random_words(rng, num_seqs),
        "modes": random_words(rng, num_seqs, low=DrawMode.GREEDY, high=DrawMode.MATCH + 1),
        "counters": random_words(rng, num_seqs),
        "tables": random_words(rng, num_seqs * table_width),
        "contexts": random_words(rng, num_seqs),
    }
    arrays |= {name: random_words(rng, 2 * num_seqs + 3) for name in ("tokens", "positions", "slots")}
    states = [SoloState.blank(num_seqs, device) for device in (DEVICE, torch.device("cpu"))]

    def with_state(advance: Any, state: SoloState) -> Any:
        return lambda arrays, verdict, width: advance(arrays, verdict, state, width)

    kernels = [
        with_state(*each) for each in zip((drafting_kernels.advance, plain_kernels.advance), states, strict=True)
    ]
    check_same_arrays(*kernels, arrays, verdict, table_width)
    assert torch.equal(states[0].heads.cpu(), states[1].heads)


@pytest.mark.parametrize("seed", range(200 if HAS_CUDA else 8))
def test_step_on_kernel(seed: int) -> None:
    rng = np.random.default_rng(seed)
    num_seqs, width, table_width = int(rng.integers(1, 12)), int(rng.integers(1, 6)), int(rng.integers(1, 9))
    contexts = random_words(rng, num_seqs, low=1, high=table_width * BLOCK_SIZE)
    contexts[0] = rng.choice([1, BLOCK_SIZE - 1, table_width * BLOCK_SIZE - 1, int(contexts[0])])
    contexts[int(rng.integers(1, num_seqs + 1)) :] = 0
    arrays = {
        "modes": random_words(rng, num_seqs, low=DrawMode.GREEDY, high=DrawMode.MATCH + 1),
        "tables": random_words(rng, num_seqs * table_width),
        "contexts": contexts,
    }
    arrays |= {name: random_words(rng, num_seqs) for name in ("counters", "tokens", "positions", "slots")}
    emitted = random_words(rng, num_seqs, width)
    check_same_arrays(drafting_kernels.step_on, plain_kernels.step_on, arrays, emitted, table_width)


class Ruling:
    """Random tokens before a random rule, with bounds that some of them are beyond."""

    def __init__(self, rng: np.random.Generator) -> None:
        count, num_seqs, capacity = int(rng.integers(1, 40)), 40, 200
        self.count = count
        signals = np.stack([rng.gamma(2, 1, capacity), *rng.random((3, capacity))], axis=1)
        signals[:, 3] *= rng.choice([1.0, 0.0, 1e-38], capacity, p=[0.9, 0.05, 0.05])
        self.signals = torch.from_numpy(signals).float()
        self.standings = torch.from_numpy(np.stack([rng.random(num_seqs), -rng.gamma(2, 1, num_seqs)], axis=1)).float()
        self.standings[torch.from_numpy(rng.random(num_seqs) < 0.3), 0] = -1.0
        self.decisions = torch.full((2, count + 4), -7, dtype=torch.int64)
        stop = self.stop(rng, num_seqs)
        sheet = Sheet.blank(Layout(ruling_sizes(count + int(rng.integers(4)))), pinned=False)
        sequences = rng.permutation(num_seqs)[:count]
        places = rng.permutation(capacity)[:count]
        depth = int(rng.integers(0, 3))
        self.number = int(rng.integers(1, 2**31))
        drafting_ruling.Ruling(stop).write(sheet.arrays, sequences, places, rng.random(count) < 0.8, depth, self.number)
        self.arrays = {name: torch.from_numpy(array) for name, array in sheet.arrays.items()}

    @staticmethod
    def stop(rng: np.random.Generator, count: int) -> Stop:
        if rng.random() < 0.5:
            offsets = np.where(rng.random(count) < rng.choice([0.0, 0.1]), np.inf, rng.normal(size=count) * 2)
            offsets[int(rng.integers(count))] = -np.inf
            costs = *rng.random(2) / 3, rng.random() * 3, rng.integers(4, size=count), rng.random() / 3
            return StopByWorth(rng.normal(size=3), offsets, rng.random(count), *costs)
        look = (*Signal, *TokenSignal)[int(rng.integers(5))]
        above, is_before = rng.random(2) < 0.5
        thresholds = rng.gamma(2, 1, count) if look is Signal.ENTROPY else rng.random(count)
        if look is TokenSignal.TOTAL_LOG_PROB:
            thresholds = -3 * thresholds
        thresholds[rng.random(count) < 0.2] = np.inf if above else -np.inf
        if is_before and isinstance(look, Signal):
            return StopBefore(look, thresholds, bool(above), first_depth=int(rng.integers(2)))
        return StopAfter(look, thresholds, bool(above))


@pytest.mark.parametrize("seed", range(300 if HAS_CUDA else 40))
def test_decide_kernel(seed: int) -> None:
    case = Ruling(np.random.default_rng(seed))
    pinned = case.decisions.clone().pin_memory() if HAS_CUDA else case.decisions.clone()
    found = {name: array.to(DEVICE, copy=True) for name, array in case.arrays.items()}
    standings = case.standings.to(DEVICE, copy=True)
    drafting_kernels.decide(found, case.signals.to(DEVICE), standings, pinned)
    if HAS_CUDA:
        torch.cuda.synchronize()
    plain_kernels.decide(case.arrays, case.signals, case.standings, case.decisions)
    assert torch.equal(pinned, case.decisions)
    assert (pinned[:, case.count :] == -7).all()
    assert (pinned[1 - case.number % 2] == -7).all()
    goes_on = case.standings[:, 0] >= 0
    torch.testing.assert_close(standings.cpu()[goes_on], case.standings[goes_on], rtol=1e-5, atol=1e-5)
    assert (standings.cpu()[~goes_on, 0] < 0).all()
    for name, array in case.arrays.items():
        assert torch.equal(found[name].cpu(), array), name


@pytest.mark.parametrize("seed", range(300 if HAS_CUDA else 40))
def test_decide_kernel_tells_the_device_alone(seed: int) -> None:
    """Lengths of drafts that are over, within their caps, and whether anybody goes on."""
    rng = np.random.default_rng(seed)
    case = Ruling(rng)
    case.arrays["depth"] = torch.tensor([int(rng.integers(0, 3))], dtype=torch.int32)
    state = SoloState.blank(40, torch.device("cpu"))
    state.caps[:] = torch.from_numpy(rng.integers(0, 6, 40))
    state.heads[:, 3] = torch.from_numpy(rng.random(40) < rng.choice([0.0, 0.05]))
    state.lengths[:] = -5
    there = SoloState(*(getattr(state, field.name).to(DEVICE, copy=True) for field in fields(state)))
    found = {name: array.to(DEVICE, copy=True) for name, array in case.arrays.items()}
    standings = case.standings.to(DEVICE, copy=True)
    drafting_kernels.decide(found, case.signals.to(DEVICE), standings, case.decisions.to(DEVICE), there)
    plain_kernels.decide(case.arrays, case.signals, case.standings, case.decisions, state)
    for field in fields(state):
        assert torch.equal(getattr(there, field.name).cpu(), getattr(state, field.name)), field.name
    told = state.lengths >= 0
    assert (state.lengths[told] <= torch.maximum(state.caps[told], case.arrays["depth"])).all()
    assert ((standings.cpu()[:, 0] >= 0) == (case.standings[:, 0] >= 0)).all()


def test_nothing_is_learnt_while_the_device_waits_for_who_joins(way: Way) -> None:
    """A slot is not given to the next at once: what was seen of who had it has to be learnt before."""
    engine = way.engine("close", "auto", max_num_seqs=2)
    policy = engine.policy
    assert isinstance(policy, Auto)
    plan, learn, plans, lessons = policy.plan, policy._learn, [], []

    def noted_plan(batch: BatchView) -> Plan:
        plans.append(batch.slots.tolist())
        before = len(lessons)
        found = plan(batch)
        joined = len(plans) > 1 and plans[-1] != plans[-2]
        assert not joined or len(lessons) == before or len(plans) < 8  # costs of a new engine are learnt at once
        return found

    def noted_learn() -> None:
        lessons.append(len(plans))
        learn()

    policy.plan, policy._learn = noted_plan, noted_learn  # type: ignore[method-assign]
    for i in range(12):
        engine.add([1, 2, 3 + i], SamplingParams(temperature=0, max_tokens=9 + 4 * (i % 3), ignore_eos=True))
    run(engine)
    assert lessons
    assert len({slot for slots in plans for slot in slots}) in (3, 4)
    check_nothing_is_held(engine)


def test_decisions_of_all_kinds_are_met() -> None:
    """Or the test above would show little."""
    met: dict[tuple[int, int], int] = {}
    for seed in range(40):
        case = Ruling(np.random.default_rng(seed))
        plain_kernels.decide(case.arrays, case.signals, case.standings, case.decisions)
        for word in case.decisions[case.number % 2, : case.count].tolist():
            key = int(case.arrays["rule"][0]), word & 0xFFFFFFFF
            assert word >> 32 == case.number
            met[key] = met.get(key, 0) + 1
    assert len(met) == 9
    assert min(met.values()) > 5


# The real kernels, interpreted where there is no device


@pytest.mark.parametrize(("policy", "draft"), [("static:3", "close"), ("static:3", "ngram"), ("worth", "close")])
def test_kernels_give_the_hosts_text(kernels: Way, policy: str, draft: str) -> None:
    params = SamplingParams(temperature=0, max_tokens=6)
    work = [([5, 6, 7, 5, 6], params), ([9] * 18, params)]
    engine = kernels.engine(draft, Ruled(rule_by_worth, length=3) if policy == "worth" else policy)
    check_same(kernels.alone(work), answers_together(engine, work, seed=0))
    assert engine.metrics.num_host_steps == 0
    assert (engine.metrics.num_stopped > 0) == (policy == "worth")


def test_kernels_follow_unseen_and_read_ahead(kernels: Way) -> None:
    """A seed's text is the same with drafts, without, and on a device that waits for the host."""
    length = 24 if HAS_CUDA else 5
    params = SamplingParams(temperature=0.9, seed=3, max_tokens=length)
    work = [([5, 6], params), ([7] * 15, params)]
    patient = kernels.engine("none", "off")
    kernels.monkeypatch.setattr(patient.executor, "follow", lambda _: None)
    expected = answers_together(patient, work, seed=0)
    for draft, policy in (("none", "off"), ("target", "static:1")):
        engine = kernels.engine(draft, policy)
        starts = HeadStarts(engine)
        check_same(expected, answers_together(engine, work, seed=0))
        assert starts.num_used + starts.num_followed > 0


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
    ("policy", "draft"),
    [
        ("static:2", "close"),
        ("static:2", "far"),
        ("static:3", "ngram"),
        ("alternating", "close"),
        ("stopping", "close"),
        ("stopping", "far"),
        ("tetris:200", "close"),
    ],
)
@pytest.mark.parametrize("name", DISTRIBUTION)
def test_distribution(name: str, policy: str, draft: str, seeded: bool) -> None:
    count = 6000
    drafts: dict[str, Any] = {
        "close": lambda: tiny_model(6, seed=3, noise=0.3, device=DEVICE),
        "far": lambda: tiny_model(6, seed=8, layers=1, device=DEVICE),
        "ngram": lambda: "ngram",
    }
    params = SamplingParams(max_tokens=LENGTH, ignore_eos=True, **DISTRIBUTION[name])
    target = tiny_model(6, seed=3, device=DEVICE)
    own: dict[str, Policy] = {"alternating": Alternating(), "stopping": Ruled(*RULES, length=3)}
    engine = make_engine(target, drafts[draft](), own.get(policy, policy), max_num_seqs=256, seed=11)
    for number in range(count):
        engine.add(PROMPT, with_seed(params, number) if seeded else params)
    counts: dict[tuple[int, ...], int] = {}
    for output in run(engine).values():
        key = tuple(output.outputs[0].token_ids)
        counts[key] = counts.get(key, 0) + 1
    assert engine.metrics.num_draft_tokens > count / 4
    assert p_value(enumerate_outputs(params), counts) > TOO_UNLIKELY


@pytest.mark.skipif(HAS_CUDA, reason="the real kernels are tested more thoroughly")
@pytest.mark.parametrize("policy", ["static:1", "changing", "stopping", "off"])
def test_distribution_of_plain_kernels(monkeypatch: pytest.MonkeyPatch, policy: str) -> None:
    """Which first tokens are drawn ahead and which of those are used has no bearing on what is drawn; nor where a draft
    is stopped."""
    use_device(monkeypatch)
    plain_kernels.install(monkeypatch, with_graphs=False)
    params = SamplingParams(max_tokens=LENGTH, ignore_eos=True, temperature=1.2)
    draft = tiny_model(6, seed=8, layers=1)
    own: dict[str, Policy] = {"changing": Changing(), "stopping": Ruled(*RULES, length=3)}
    counts = sample_outputs(draft, own.get(policy, policy), params, False, 500)
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


def test_synthetic_acceptance_by_request(kernels: Way) -> None:
    rates = ((0.0,), (1.0, 0.0))
    engine = kernels.engine("far", "static:2", synthetic_acceptance=rates)
    names = [
        engine.add([1, 3], SamplingParams(max_tokens=8, seed=seed, temperature=0), trace=True) for seed in range(4)
    ]
    done = run(engine)
    kinds = [kind_of(derive_stream(seed, 0), len(rates)) for seed in range(4)]
    assert set(kinds) == {0, 1}
    for name, kind in zip(names, kinds, strict=True):
        assert {record.accepted for record in done[name].metrics.trace or [] if record.drafted} == {kind}


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


def test_no_graph_outlives_what_it_points_to(way: Way) -> None:
    """Memory runs out while the draft store moves: nothing captured before may be used again, and nothing is lost."""
    way.monkeypatch.setattr("dsde.engine.engine.describe_shortage", lambda *_: "too little")
    engine = way.engine("close", "static:9", max_num_seqs=64)
    prompts = [[i + 1] * 5 for i in range(24)]
    names = [engine.add(prompt, GREEDY) for prompt in prompts[:2]]
    for _ in range(4):
        engine.step()
    names += [engine.add(prompt, GREEDY) for prompt in prompts[2:]]
    executor = engine.executor
    assert isinstance(executor, DeviceExecutor)
    assert executor.drafter is not None
    outputs: dict[str, RequestOutput] = {}
    with way.monkeypatch.context() as patch:

        def refuse(*_: Any) -> None:
            raise torch.OutOfMemoryError("no memory")

        def step_often() -> None:
            for _ in range(10):
                outputs.update((output.request_id, output) for output in engine.step().finished)

        patch.setattr("dsde.sampling.kernels.DraftStore.allocate", refuse)
        with pytest.raises(OutOfMemory, match="too little"):
            step_often()
        assert not executor.passes._passes
        assert not executor.drafter.passes._passes
    outputs |= run(engine)
    expected = way.alone([(prompt, GREEDY) for prompt in prompts])
    assert [outputs[name].outputs[0].token_ids for name in names] == [o.outputs[0].token_ids for o in expected]


@pytest.mark.parametrize(("draft", "policy"), [("close", "static:3"), ("none", "off")], ids=["ahead", "following"])
def test_a_head_start_draws_what_would_have_been_drawn(way: Way, draft: str, policy: str) -> None:
    """Unseeded draws are keyed by the step: one made before the host knows of the step must have its numbers."""
    params = SamplingParams(temperature=1.0, max_tokens=20, ignore_eos=True)
    prompts = [[i + 1, 3, 5] for i in range(6)]

    def texts() -> list[list[int]]:
        outputs = complete(way.engine(draft, policy, max_num_seqs=6), prompts, params)
        return [output.outputs[0].token_ids for output in outputs]

    with_head_start = texts()
    way.monkeypatch.setattr(drafting_device.DeviceDrafter, "read_ahead", lambda *_: False)
    way.monkeypatch.setattr(DeviceExecutor, "follow", lambda *_: None)
    assert texts() == with_head_start


LONG = {"seed": 7, "layers": 2, "max_len": 1024}
MODELS |= {"long": LONG, "close to long": LONG | {"noise": 0.15}}


@pytest.mark.parametrize(("policy", "num_seqs"), [("static:2", 1), ("static:5", 6), ("dsde", 3)])
@pytest.mark.parametrize("draft", ["long", "close to long"])
def test_contexts_that_several_programs_share(way: Way, draft: str, policy: str, num_seqs: int) -> None:
    """Verification in the middle of a split of its own context, and more sequences in a bucket than tokens for them."""
    rng = random.Random(3)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    prompts = [[rng.randrange(VOCAB) for _ in range(length)] for length in (20, 118, 250, 380, 505, 640)]
    with way.host():
        host = make_engine(model("long", torch.device("cpu")), None, max_model_len=1024, kv_cache_bytes=1 << 27)
        expected = tokens_of(complete(host, prompts, params))
    engine = make_engine(
        model("long"), model(draft), policy, max_num_seqs=num_seqs, max_model_len=1024, kv_cache_bytes=1 << 27
    )
    for _ in range(2):
        assert tokens_of(complete(engine, prompts, params)) == expected
    if draft == "long":
        assert engine.metrics.num_accepted_tokens == engine.metrics.num_draft_tokens > 0
