"""The engine's own behaviour: memory, pauses, sharing, refusals, streams. The models are tiny, the rest is real."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest
import torch

from dsde import InvalidInput, RequestOutput, SamplingParams
from dsde.bench.recorder import Recorder as BenchRecorder
from dsde.engine.engine import Engine
from dsde.engine.executor import Landing, Seconds
from dsde.engine.planning import LengthPlan
from dsde.engine.scheduler import blocks_for
from dsde.models.batch import BLOCK_SIZE, pack
from dsde.models.decoder import Decoder
from dsde.policies import BatchView, Need, Outcome, Plan, Policy, Static
from tiny import complete, make_engine, run, tiny_model

VOCAB = 64
TARGET = tiny_model(VOCAB, seed=7)
DRAFT = tiny_model(VOCAB, seed=7, noise=0.15)
BLOCK_BYTES = (TARGET.config.kv_bytes_per_token(torch.float32) + DRAFT.config.kv_bytes_per_token(torch.float32)) * 16
GREEDY = SamplingParams(temperature=0, max_tokens=24)


def random_prompts(count: int, low: int, high: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB) for _ in range(rng.randrange(low, high))] for _ in range(count)]


def tokens_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def alone(prompts: list[list[int]], params: SamplingParams) -> list[list[int]]:
    return [tokens_of(complete(make_engine(TARGET, None), [prompt], params))[0] for prompt in prompts]


def check_nothing_is_held(engine: Engine) -> None:
    assert engine.scheduler.pool.num_free == engine.scheduler.pool.num_blocks
    assert not engine.requests


# Memory


@pytest.mark.parametrize("policy", ["off", "static:5", "dsde"])
def test_sixty_four_requests_with_memory_for_four(policy: str) -> None:
    prompts = random_prompts(64, 10, 40)
    blocks = 4 * -(-(40 + 24) // BLOCK_SIZE)
    engine = make_engine(TARGET, DRAFT, policy, kv_cache_bytes=blocks * BLOCK_BYTES)
    assert engine.scheduler.pool.num_blocks == blocks
    assert tokens_of(complete(engine, prompts, GREEDY)) == alone(prompts, GREEDY)
    assert engine.metrics.num_preemptions > 0
    check_nothing_is_held(engine)


def test_preemption_keeps_sampled_text_too() -> None:
    params = SamplingParams(temperature=1, seed=5, max_tokens=30)
    prompts = random_prompts(12, 10, 30)
    engine = make_engine(TARGET, DRAFT, "dsde", kv_cache_bytes=9 * BLOCK_BYTES)
    assert tokens_of(complete(engine, prompts, params)) == alone(prompts, params)
    assert engine.metrics.num_preemptions > 0


def test_short_memory_trims_lengths_and_counts_it() -> None:
    prompts = [*random_prompts(1, 30, 31), *random_prompts(1, 10, 11)]
    engine = make_engine(TARGET, DRAFT, "static:12", kv_cache_bytes=4 * BLOCK_BYTES)
    for prompt in prompts:
        engine.add(prompt, GREEDY, trace=True)
    engine.step()
    engine.step()
    # The first took the last free block for its look-ahead, the second makes do with what it has.
    traces = [request.metrics.trace or [] for request in engine.requests.values()]
    assert [(trace[0].planned, trace[0].drafted) for trace in traces] == [(12, 12), (12, 5)]
    assert engine.metrics.num_trimmed == 1
    done = run(engine)
    assert tokens_of([done[name] for name in sorted(done)]) == alone(prompts, GREEDY)
    check_nothing_is_held(engine)


def test_look_ahead_is_reserved_for_the_chosen_length_only() -> None:
    prompt = random_prompts(1, 15, 16)[0]
    held = {}
    for policy in ("static:1", "static:18"):
        engine = make_engine(TARGET, DRAFT, policy)
        engine.add(prompt, SamplingParams(temperature=0, max_tokens=40))
        engine.step()
        before = engine.scheduler.pool.num_free
        plan = engine.planner.plan(engine.scheduler.schedule().decodes)
        held[policy] = before - engine.scheduler.pool.num_free
        assert plan.lengths.tolist() == [int(policy.partition(":")[2])]
    assert held == {"static:1": 1, "static:18": 2}


def test_a_policy_is_told_who_joins() -> None:
    """A long prompt is read in pieces beside a request that decodes, and only the last of them makes somebody join."""

    found: list[tuple[int, int]] = []

    class Noting(Static):
        def plan(self, batch: BatchView) -> Plan:
            found.append((batch.num_prompt_tokens, batch.num_joining))
            return super().plan(batch)

    short, long = random_prompts(2, 4, 5)[0], random_prompts(1, 40, 41)[0]
    engine = make_engine(TARGET, DRAFT, Noting(1), max_num_batched_tokens=20)
    engine.add(short, SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
    engine.step()
    engine.add(long, GREEDY)
    run(engine)
    told = [each for each in found if each[0]]
    assert sum(num_tokens for num_tokens, _ in told) == len(long)
    assert len(told) > 1
    assert [num_joining for _, num_joining in told] == [0] * (len(told) - 1) + [1]


def test_spare_memory_is_given_back_to_who_waits_for_it() -> None:
    """Blocks for tokens to come, as long as nobody needs them."""
    engine = make_engine(TARGET, None, kv_cache_bytes=12 * BLOCK_BYTES // 2)
    engine.scheduler.num_spare = 4 * BLOCK_SIZE
    pool, params = engine.scheduler.pool, SamplingParams(temperature=0, max_tokens=90, ignore_eos=True)
    engine.add(random_prompts(1, 10, 11)[0], params)
    for _ in range(3):
        engine.step()
    first = engine.scheduler.running[0]
    assert len(first.block_table) == 1 + 4
    assert pool.num_free == pool.num_blocks - 5
    engine.add(random_prompts(1, 8 * BLOCK_SIZE, 8 * BLOCK_SIZE + 1)[0], SamplingParams(max_tokens=2))
    engine.step()
    assert len(engine.scheduler.running) == 2
    assert len(first.block_table) <= 2
    run(engine)
    check_nothing_is_held(engine)


def test_nobody_is_thrown_out_for_memory_that_others_keep_to_spare() -> None:
    """Without any to spare these fit."""
    engine = make_engine(TARGET, None, kv_cache_bytes=13 * BLOCK_BYTES // 2)
    engine.scheduler.num_spare = 4 * BLOCK_SIZE
    for number, (num_prompt_tokens, max_tokens) in enumerate([(4, 98), (18, 80), (6, 31)]):
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        engine.add([1 + number] * num_prompt_tokens, params)
    run(engine)
    assert engine.metrics.num_preemptions == 0
    check_nothing_is_held(engine)


@pytest.mark.parametrize("draft", [DRAFT, "ngram"])
def test_a_policy_is_told_what_the_draft_has_yet_to_read(draft: Decoder | str) -> None:
    """Its prompt, then what came while nobody drafted; and nothing where a draft needs to have read nothing."""
    batches: list[BatchView] = []

    class Noting(Static):
        def plan(self, batch: BatchView) -> Plan:
            batches.append(batch)
            self.length = 2 if len(batches) in (3, 4, 5) else 0
            return super().plan(batch)

    engine = make_engine(TARGET, draft, Noting(0))
    engine.add(random_prompts(1, 20, 21)[0], SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
    while len(batches) < 7:
        engine.step()
    left = [int(batch.num_left[0]) for batch in batches if batch.num_left is not None]
    assert left[:3] == [39, 38, 37]
    assert left == [int(batch.rooms[0]) + 1 for batch in batches]
    if draft == "ngram":
        assert all(batch.num_missed is None for batch in batches)
        return
    missed = [int(batch.num_missed[0]) for batch in batches if batch.num_missed is not None]
    assert missed[:3] == [20, 21, 22]
    assert max(missed[3:6]) <= 1
    assert missed[6] == missed[5] + 1


def views_of(engine: Engine, num_steps: int) -> list[BatchView]:
    seen: list[BatchView] = []
    plan = engine.policy.plan

    def noting(batch: BatchView) -> Plan:
        seen.append(batch)
        return plan(batch)

    engine.policy.plan = noting  # type: ignore[method-assign]
    for _ in range(num_steps):
        engine.step()
    return seen


def test_there_is_no_room_for_drafts_beyond_what_a_draft_can_read() -> None:
    engine = make_engine(TARGET, tiny_model(seed=1, max_len=32), "static:4")
    engine.add(random_prompts(1, 24, 25)[0], SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
    views = views_of(engine, 60)
    rooms = [int(view.rooms[0]) for view in views]
    left = [int(view.num_left[0]) for view in views if view.num_left is not None]
    num_tokens = [24 + 40 - each for each in left]
    assert rooms == [max(min(each - 1, 33 - num), 0) for each, num in zip(left, num_tokens, strict=True)]
    assert rooms[0] > 0
    assert rooms[-2] == 0
    assert left[-2] > 1


@pytest.mark.parametrize("params", [{}, {"logprobs": 2}, {"presence_penalty": 0.5}, {"min_tokens": 9}])
@pytest.mark.parametrize("is_chosen_for", [True, False])
def test_batches_are_whole_in_passes_only_where_a_device_makes_them_alone(params: dict, is_chosen_for: bool) -> None:
    engine = make_engine(TARGET, DRAFT, "static:1")
    engine.executor.most_whole = 2  # type: ignore[misc]
    for prompt, more in zip(random_prompts(2, 10, 11), ({}, params), strict=True):
        speculation = "on" if is_chosen_for or not more else 2
        engine.add(prompt, SamplingParams(temperature=0, max_tokens=9, speculation=speculation, **more))
    assert views_of(engine, 3)[-1].has_whole_passes == (not params)


def test_what_can_never_fit_is_refused_at_once() -> None:
    engine = make_engine(TARGET, DRAFT, "off", kv_cache_bytes=4 * BLOCK_BYTES, max_model_len=200)
    with pytest.raises(InvalidInput, match=r"may grow to 70 tokens, but the KV cache holds 64"):
        engine.add([1] * 20, SamplingParams(max_tokens=50))
    with pytest.raises(InvalidInput, match=r"The prompt has 200 tokens.*max_model_len"):
        engine.add([1] * 200, GREEDY)
    assert not engine.has_work
    complete(engine, [[1] * 20], SamplingParams(max_tokens=44))


def test_a_budget_below_one_block_is_refused() -> None:
    with pytest.raises(InvalidInput, match=r"kv_cache_bytes must be at least"):
        make_engine(TARGET, DRAFT, "off", kv_cache_bytes=100)


def test_target_and_draft_share_one_budget() -> None:
    with_draft = make_engine(TARGET, DRAFT, "off", kv_cache_bytes=100 * BLOCK_BYTES)
    without = make_engine(TARGET, None, "off", kv_cache_bytes=100 * BLOCK_BYTES)
    assert with_draft.scheduler.pool.num_blocks == 100
    assert without.scheduler.pool.num_blocks == 200


# Prompts


@pytest.mark.parametrize("budget", [8, 16, 37, 512])
def test_chunked_prefill_changes_nothing(budget: int) -> None:
    prompts = random_prompts(6, 30, 150)
    engine = make_engine(TARGET, DRAFT, "static:3", max_num_batched_tokens=budget)
    assert tokens_of(complete(engine, prompts, GREEDY)) == alone(prompts, GREEDY)


def test_prefix_cache_is_used_and_changes_nothing() -> None:
    common = random_prompts(1, 100, 101)[0]
    prompts = [common + tail for tail in random_prompts(5, 3, 20, seed=1)]
    engine = make_engine(TARGET, DRAFT, "static:3")
    first = complete(engine, prompts[:1], GREEDY)
    later = complete(engine, prompts[1:], GREEDY)
    assert tokens_of(first + later) == alone(prompts, GREEDY)
    for output in later:
        assert output.metrics.num_cached_prompt_tokens == 96
        # The draft's half of the blocks is shared as well: it has only the tail to read.
        assert output.metrics.num_catch_up_tokens < 40


def test_prompts_that_arrive_together_are_shared_in_the_same_step() -> None:
    prompt = random_prompts(1, 64, 65)[0]
    engine = make_engine(TARGET, None, "off")
    outputs = complete(engine, [prompt] * 3, GREEDY)
    assert [output.metrics.num_cached_prompt_tokens for output in outputs] == [0, 48, 48]
    assert tokens_of(outputs) == alone([prompt] * 3, GREEDY)


def test_draft_half_of_a_shared_block_is_read_where_it_is_missing() -> None:
    prompt = random_prompts(1, 64, 65)[0]
    engine = make_engine(TARGET, DRAFT, "static:3")
    complete(engine, [prompt], SamplingParams(temperature=0, max_tokens=4, speculation="off"))
    output = complete(engine, [prompt], GREEDY)[0]
    assert output.metrics.num_cached_prompt_tokens == 48
    assert output.metrics.num_catch_up_tokens >= 64
    fresh = complete(make_engine(TARGET, DRAFT, "static:3"), [prompt], GREEDY)[0]
    assert output.metrics.num_accepted_tokens == fresh.metrics.num_accepted_tokens


def test_what_a_draft_accepted_whole_leaves_unread_was_not_missed() -> None:
    prompt = random_prompts(1, 64, 65)[0]
    output = complete(make_engine(TARGET, TARGET, "static:3"), [prompt], GREEDY)[0]
    assert output.metrics.num_accepted_tokens == output.metrics.num_draft_tokens > 0
    assert output.metrics.num_catch_up_tokens == 64


def test_backlog_larger_than_one_pass() -> None:
    prompts = random_prompts(3, 150, 200)
    engine = make_engine(TARGET, DRAFT, "static:3", max_num_batched_tokens=32)
    small = complete(engine, prompts, GREEDY)
    large = complete(make_engine(TARGET, DRAFT, "static:3"), prompts, GREEDY)
    assert tokens_of(small) == tokens_of(large)
    # Spread over steps: nobody waits for one long pass.
    assert engine.metrics.num_undrafted > 0
    assert all(o.metrics.num_catch_up_tokens >= 150 and o.metrics.num_draft_tokens for o in small)


# Pauses


class PauseThenDraft(Policy):
    """Length 0 for a while, then 4."""

    def __init__(self, num_paused_steps: int) -> None:
        self.num_paused_steps = num_paused_steps
        self.num_steps = 0

    def plan(self, batch: BatchView) -> Plan:
        length = 0 if self.num_steps < self.num_paused_steps else 4
        lengths = np.minimum(length, batch.rooms)
        return Plan(lengths, lengths.astype(float), np.ones(len(lengths), dtype=bool))

    def observe(self, outcome: Outcome) -> None:
        self.num_steps += 1


def test_acceptance_after_a_pause_equals_acceptance_without_it() -> None:
    prompts = random_prompts(5, 5, 40)
    num_paused, rest = 50, 60
    for prompt in prompts:
        paused = make_engine(TARGET, DRAFT, PauseThenDraft(num_paused))
        params = SamplingParams(temperature=0, max_tokens=1 + num_paused + rest)
        paused.add(prompt, params, "paused", trace=True)
        after = run(paused)["paused"]
        trace = [record for record in after.metrics.trace or [] if record.planned]

        # The same text, but the draft has read all of it in one go.
        start = prompt + after.outputs[0].token_ids[:num_paused]
        engine = make_engine(TARGET, DRAFT, "static:4")
        engine.add(start, SamplingParams(temperature=0, max_tokens=1 + rest), "fresh", trace=True)
        fresh = [record for record in run(engine)["fresh"].metrics.trace or [] if record.planned]

        assert [(r.drafted, r.accepted) for r in trace] == [(r.drafted, r.accepted) for r in fresh]
        for a, b in zip(trace, fresh, strict=True):
            np.testing.assert_allclose(a.klds, b.klds, atol=1e-4)
        assert sum(r.accepted for r in trace) > 0


def test_a_pause_of_one_request_leaves_others_alone() -> None:
    prompts = random_prompts(2, 20, 21)
    engine = make_engine(TARGET, DRAFT, "static:4")
    on = engine.add(prompts[0], GREEDY)
    off = engine.add(prompts[1], SamplingParams(temperature=0, max_tokens=24, speculation="off"))
    fixed = engine.add(prompts[1], SamplingParams(temperature=0, max_tokens=24, speculation=2))
    done = run(engine)
    assert done[off].metrics.num_draft_tokens == 0
    assert done[on].metrics.num_draft_tokens > 0
    assert done[fixed].outputs[0].token_ids == done[off].outputs[0].token_ids
    drafts = done[fixed].metrics.num_drafts
    assert drafts * 2 - 2 <= done[fixed].metrics.num_draft_tokens <= drafts * 2


# Fairness and endings


def test_first_come_first_served() -> None:
    engine = make_engine(TARGET, None, "off", max_num_seqs=2)
    ids = [engine.add([i + 1], SamplingParams(temperature=0, max_tokens=5)) for i in range(6)]
    order = []
    while engine.has_work:
        order += [output.request_id for output in engine.step().finished]
    assert order == ids


def test_a_long_prompt_does_not_stop_those_who_decode() -> None:
    engine = make_engine(TARGET, None, "off", max_num_batched_tokens=16)
    engine.add([1, 2, 3], SamplingParams(temperature=0, max_tokens=40), "short")
    engine.step()
    engine.add([5] * 200, SamplingParams(temperature=0, max_tokens=2), "long")
    for _ in range(10):
        assert "short" in [chunk.request_id for chunk in engine.step().chunks]


def test_finish_reasons() -> None:
    reference = alone([[3, 1, 4]], GREEDY)[0]
    stop = reference[9]
    first = reference.index(stop)
    engine = make_engine(TARGET, DRAFT, "static:6")
    params = SamplingParams(temperature=0, max_tokens=24, stop_token_ids=[stop])
    output = complete(engine, [[3, 1, 4]], params)[0].outputs[0]
    assert output.token_ids == reference[: first + 1]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)
    full = complete(engine, [[3, 1, 4]], GREEDY)[0].outputs[0]
    assert (full.finish_reason, full.stop_reason) == ("length", None)
    assert len(full.token_ids) == 24


def test_context_limit_ends_a_request() -> None:
    engine = make_engine(TARGET, DRAFT, "static:8", max_model_len=40)
    output = complete(engine, [[1] * 30], SamplingParams(temperature=0, max_tokens=None))[0].outputs[0]
    assert (len(output.token_ids), output.finish_reason) == (10, "length")


def test_abort() -> None:
    engine = make_engine(TARGET, DRAFT, "dsde", max_num_seqs=1)
    running, waiting = engine.add([1, 2], GREEDY), engine.add([3], GREEDY)
    engine.step()
    engine.step()
    aborted = engine.abort(running)
    assert aborted is not None
    assert aborted.outputs[0].finish_reason == "abort"
    assert aborted.outputs[0].token_ids
    assert engine.abort(waiting) is not None
    assert engine.abort("nobody") is None
    assert not engine.has_work
    check_nothing_is_held(engine)


def test_a_name_in_use_is_refused() -> None:
    engine = make_engine(TARGET, None, "off")
    engine.add([1], GREEDY, "twice")
    with pytest.raises(InvalidInput, match="twice"):
        engine.add([1], GREEDY, "twice")


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], {}, "empty"),
        ([1, VOCAB], {}, f"from 0 to {VOCAB - 1}, got {VOCAB}"),
        ([1, -1], {}, "got -1"),
        (["a"], {}, "must be text or a list of token ids, got"),
        (None, {}, "must be text or a list of token ids, got None"),
        ("text", {}, "no tokenizer"),
        ([1], {"stop": "x"}, "stop strings need a tokenizer"),
        ([1], {"logit_bias": {VOCAB: 1.0}}, "logit_bias names token 64"),
        ([1], {"stop_token_ids": [99]}, "stop_token_ids names token 99"),
        ([1], {"logprobs": VOCAB + 1}, "logprobs must be at most 64"),
    ],
)
def test_bad_requests_get_one_sentence(prompt: list[int], params: dict[str, object], message: str) -> None:
    engine = make_engine(TARGET, None, "off")
    with pytest.raises(InvalidInput, match=message):
        engine.add(prompt, SamplingParams(**params))  # type: ignore[arg-type]
    assert not engine.has_work


# Reports


def test_counts_agree_with_each_other() -> None:
    engine = make_engine(TARGET, DRAFT, "dsde")
    outputs = complete(engine, random_prompts(10, 5, 40), SamplingParams(temperature=0, max_tokens=60))
    total = engine.metrics
    for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_emitted_tokens", "num_catch_up_tokens"):
        assert getattr(total, name) == sum(getattr(output.metrics, name) for output in outputs)
    assert sum(total.num_accepted_tokens_per_pos) == total.num_accepted_tokens
    assert sum(total.num_draft_tokens_per_pos) == total.num_draft_tokens
    assert total.num_emitted_tokens == 600
    for output in outputs:
        metrics = output.metrics
        assert metrics.num_emitted_tokens == 60 == metrics.num_steps + metrics.num_accepted_tokens
        assert 0 < metrics.first_token_s < metrics.total_s


def test_trace_tells_every_step() -> None:
    engine = make_engine(TARGET, DRAFT, "dsde")
    engine.add([1, 2, 3], SamplingParams(temperature=0, max_tokens=80), "traced", trace=True)
    engine.add([4, 5], SamplingParams(temperature=0, max_tokens=80), "other")
    done = run(engine)
    assert done["other"].metrics.trace is None
    trace = done["traced"].metrics.trace
    assert trace is not None
    assert sum(record.accepted for record in trace) == done["traced"].metrics.num_accepted_tokens
    assert trace[0].predicted == 4
    assert trace[0].signals["wvir"] is None
    for record, following in pairwise(trace):
        assert len(record.klds) == record.drafted <= record.planned
        assert following.num_tokens == record.num_tokens + record.accepted + 1
        assert record.draft_s + record.verify_s <= record.step_s
        assert min(record.klds, default=0) >= 0
    late = trace[-2]
    assert late.signals["scale_factor"] == pytest.approx(np.expm1(2 * np.mean(trace[-3].klds)), rel=1e-4)


def test_several_completions_share_the_prompt() -> None:
    prompt = random_prompts(1, 50, 51)[0]
    engine = make_engine(TARGET, DRAFT, "static:3")
    params = SamplingParams(temperature=1, n=4, seed=3, max_tokens=12)
    output = complete(engine, [prompt], params)[0]
    texts = [tuple(completion.token_ids) for completion in output.outputs]
    assert [completion.index for completion in output.outputs] == [0, 1, 2, 3]
    assert len(set(texts)) == 4
    assert output.metrics.num_cached_prompt_tokens == 3 * 48
    assert complete(make_engine(TARGET, None), [prompt], params)[0].outputs == output.outputs


def test_slots_are_reused_and_forgotten() -> None:
    engine = make_engine(TARGET, DRAFT, "dsde", max_num_seqs=4)
    prompts = random_prompts(12, 3, 20)
    outputs = complete(engine, prompts, SamplingParams(temperature=0, max_tokens=40))
    assert engine._num_slots <= 2 * 4  # those that were given back in a step are for the next but one
    assert len(outputs) == 12
    engine.add([1, 2], GREEDY, "late", trace=True)
    first = (run(engine)["late"].metrics.trace or [])[0]
    assert first.predicted == 4
    assert first.signals["scale_factor"] is None


def test_klds_are_those_of_their_positions() -> None:
    engine = make_engine(TARGET, DRAFT, "static:3")
    engine.add([1, 2, 3], SamplingParams(temperature=1, seed=4, max_tokens=30), "traced", trace=True)
    engine.add([4, 5, 6, 7], SamplingParams(temperature=1, seed=5, max_tokens=30, speculation=1))
    output = run(engine)["traced"]
    tokens = [1, 2, 3, *output.outputs[0].token_ids]
    for record in output.metrics.trace or []:
        # Drafted tokens that stood are known; so is the distribution they and the next one were judged by.
        for depth in range(min(record.accepted + 1, record.drafted)):
            p, q = (fresh_probs(model, tokens[: record.num_tokens + depth]) for model in (TARGET, DRAFT))
            assert record.klds[depth] == pytest.approx(float((p * (p.log() - q.log())).sum()), abs=1e-4)


def fresh_probs(model: Decoder, tokens: list[int]) -> torch.Tensor:
    lengths = np.array([len(tokens)])
    batch = pack(np.array(tokens), lengths, lengths, [list(range(4))], lengths - 1, torch.device("cpu"))
    return torch.softmax(model.forward(batch, model.new_cache(4))[0].double(), -1)


class Recorder(Static):
    """Static lengths, and everything that was observed."""

    needs = Need.KLD

    def __init__(self) -> None:
        super().__init__(3)
        self.outcomes: list[Outcome] = []

    def observe(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)


def test_a_policy_observes_its_own_sequences_only() -> None:
    recorder = Recorder()
    engine = make_engine(TARGET, DRAFT, recorder)
    engine.add([9, 9], SamplingParams(temperature=0, max_tokens=20, speculation=2))
    engine.add([1, 2, 3], SamplingParams(temperature=0, max_tokens=20), "own", trace=True)
    engine.add([8], SamplingParams(temperature=0, max_tokens=20, speculation="off"))
    trace = [record for record in run(engine)["own"].metrics.trace or [] if record.planned]
    seen = [outcome for outcome in recorder.outcomes if outcome.drafted.sum()]
    assert [outcome.klds.tolist() for outcome in seen] == [record.klds for record in trace]
    assert [outcome.accepted.tolist() for outcome in seen] == [[record.accepted] for record in trace]


@pytest.mark.parametrize("is_looked_at", [True, False])
def test_drafts_that_no_rule_may_end_are_looked_at_if_somebody_wants_it(is_looked_at: bool) -> None:
    """On a CPU, where it takes time; whoever records wants it in any case."""

    class Indifferent(Recorder):
        needs = Need.DRAFT_SIGNALS

        def plan(self, batch: BatchView) -> Plan:
            plan = super().plan(batch)
            plan.wants_signals = is_looked_at
            return plan

    params = SamplingParams(temperature=0, max_tokens=20)
    for wraps in (False, True):
        policy = Indifferent()
        recorder = BenchRecorder(policy) if wraps else policy
        engine = make_engine(TARGET, DRAFT, recorder)
        engine.add([1, 2, 3], params)
        run(engine)
        drafts = [outcome for outcome in recorder.outcomes if outcome.drafted.any()]
        assert len(drafts) > 3
        expected = [int(outcome.drafted.sum()) if is_looked_at or wraps else 0 for outcome in drafts]
        assert [outcome.draft_signals.shape[0] for outcome in drafts] == expected


@pytest.mark.parametrize("seed", range(8))
def test_a_draft_that_is_the_target_is_never_rejected(seed: int) -> None:
    """Whatever happens to memory and schedule: one hole in the draft's KV and a token would fall."""
    rng = random.Random(seed)
    block = 2 * TARGET.config.kv_bytes_per_token(torch.float32) * BLOCK_SIZE
    engine = make_engine(
        TARGET,
        TARGET,
        rng.choice(["static:4", "dsde", "auto", "dsde:release"]),
        kv_cache_bytes=rng.choice([9, 12, 30]) * block,
        max_num_seqs=rng.choice([3, 8, 16]),
        max_num_batched_tokens=rng.choice([3, 17, 40, 200]),
        max_model_len=128,
    )
    shared = [rng.randrange(VOCAB) for _ in range(64)]
    names: list[str] = []
    while len(names) < 20 or engine.has_work:
        while len(names) < 20 and rng.random() < 0.7:
            tail = [rng.randrange(VOCAB) for _ in range(rng.randrange(6))]
            greedy = rng.random() < 0.5
            params = SamplingParams(
                temperature=0 if greedy else 1,
                seed=None if rng.random() < 0.3 else rng.randrange(9),
                max_tokens=rng.randrange(1, 50),
                speculation=rng.choice(["on", "on", "off", 3, 12]),
                repetition_penalty=rng.choice([1, 1.3]),
                prompt_logprobs=rng.choice([None, None, 0]),
                n=rng.choice([1, 2]),
            )
            names.append(engine.add(shared[: rng.randrange(1, 64)] + tail, params))
        if rng.random() < 0.03:
            engine.abort(rng.choice(names))
        engine.step()
        check_books(engine)
    assert engine.metrics.num_accepted_tokens == engine.metrics.num_draft_tokens > 0
    check_nothing_is_held(engine)


def check_books(engine: Engine) -> None:
    """Every block is held by exactly those whose table names it, and nobody keeps more than its tokens need."""
    pool = engine.scheduler.pool
    held = [0] * pool.num_blocks
    for sequence in engine.scheduler.running:
        assert blocks_for(sequence.num_computed) <= len(sequence.block_table) <= blocks_for(sequence.num_tokens)
        assert sequence.num_draft_computed <= sequence.num_computed < sequence.num_tokens
        for block in sequence.block_table:
            held[block] += 1
    assert held == pool._holders
    assert [pool.is_free(block) for block in range(pool.num_blocks)] == [count == 0 for count in held]
    assert all(not sequence.block_table for sequence in engine.scheduler.waiting)


def test_what_was_written_last_is_not_shared_before_it_is_read() -> None:
    """The newest token of a sequence has no KV yet, also when it fills a block."""
    engine = make_engine(TARGET, None, "off")
    name = engine.add([1] * 10, SamplingParams(temperature=0, max_tokens=30))
    while engine.requests[name].completions[0].sequence.num_tokens % BLOCK_SIZE:
        engine.step()
    aborted = engine.abort(name)
    assert aborted is not None
    prompt = [1] * 10 + aborted.outputs[0].token_ids + [7]
    assert tokens_of(complete(engine, [prompt], GREEDY)) == alone([prompt], GREEDY)


def test_a_step_that_is_interrupted_leaves_nothing_wrong_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = random_prompts(4, 40, 60)
    engine = make_engine(TARGET, DRAFT, "static:3")
    for prompt in prompts:
        engine.add(prompt, GREEDY)
    engine.step()
    engine.step()

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(engine.target, "run", interrupt)
        engine.add([2] * 50, GREEDY, "new")
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    # Those under way go on as if nothing had happened, and so does whoever brings the same prompt.
    done = run(engine)
    assert tokens_of([done[f"request-{i}"] for i in range(4)]) == alone(prompts, GREEDY)
    assert done["new"].outputs[0].token_ids == alone([[2] * 50], GREEDY)[0]
    assert tokens_of(complete(engine, prompts, GREEDY)) == alone(prompts, GREEDY)


def test_the_next_turn_of_a_chat_reads_only_what_is_new() -> None:
    engine = make_engine(TARGET, DRAFT, "static:4")
    first = complete(engine, [[3] * 20], SamplingParams(temperature=0, max_tokens=30))[0]
    turn = [3] * 20 + first.outputs[0].token_ids + [5, 6]
    assert complete(engine, [turn], GREEDY)[0].metrics.num_cached_prompt_tokens == 48


def test_an_idle_engine_does_nothing() -> None:
    output = make_engine(TARGET, None, "off").step()
    assert (output.chunks, output.finished) == ([], [])


def test_names_that_collide_are_refused() -> None:
    engine = make_engine(TARGET, None, "off")
    engine.add([1], GREEDY, "request-1")
    with pytest.raises(InvalidInput, match="request-1"):
        engine.add([2], GREEDY)


@pytest.mark.parametrize("draft", [tiny_model(VOCAB, seed=7, max_len=32), tiny_model(VOCAB - 20, seed=7)])
def test_a_draft_may_know_less_than_its_target(draft: Decoder) -> None:
    prompts = [[VOCAB - 1, VOCAB - 2, 3], [5] * 28]
    engine = make_engine(TARGET, draft, "static:4")
    params = SamplingParams(temperature=0, max_tokens=40)
    assert tokens_of(complete(engine, prompts, params)) == alone(prompts, params)
    assert engine.metrics.num_draft_tokens > 0


def test_models_that_give_nan_do_not_hang_or_crash() -> None:
    broken = tiny_model(VOCAB, seed=7)
    broken.embedding[5] = torch.nan
    engine = make_engine(broken, DRAFT, "dsde")
    for temperature in (0.0, 1.0):
        output = complete(engine, [[5, 5]], SamplingParams(temperature=temperature, max_tokens=8))[0]
        assert len(output.outputs[0].token_ids) == 8
        assert all(0 <= token < VOCAB for token in output.outputs[0].token_ids)


class Alternating(Policy):
    """Drafts in every second step, and keeps what it is told."""

    def __init__(self) -> None:
        self.num_plans = 0
        self.outcomes: list[Outcome] = []

    def plan(self, batch: BatchView) -> Plan:
        self.num_plans += 1
        return Plan.wanting(2 * (self.num_plans % 2), batch)

    def observe(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)


def test_steps_are_told_what_they_took_in_all_unless_there_was_nothing_to_do_before() -> None:
    policy = Alternating()
    engine = make_engine(TARGET, DRAFT, policy)
    for _ in range(2):
        policy.outcomes.clear()
        complete(engine, random_prompts(1, 10, 20), GREEDY)
        first, *others = policy.outcomes
        # Its prompt has been read in a step of its own.
        assert first.step_s > 0
        assert all(outcome.step_s > outcome.draft_s + outcome.verify_s for outcome in others)
        assert engine._landed_at is None


@pytest.mark.parametrize(("is_cold", "is_padded"), [(False, False), (True, False), (False, True)])
def test_a_draft_is_told_what_the_device_waited_for_it_and_nobody_what_is_not_typical(
    is_cold: bool, is_padded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = Alternating()
    engine = make_engine(TARGET, DRAFT, policy)
    observe = engine.planner.observe

    def observe_timed(
        plan: LengthPlan, drafted: np.ndarray, caught_up: np.ndarray | None, landing: Landing, step_s: float
    ) -> None:
        landing.seconds = Seconds(draft=1.0, target=2.0, accept=3.0, idle=0.5)
        landing.is_cold, landing.is_padded = is_cold, is_padded
        observe(plan, drafted, caught_up, landing, step_s)

    monkeypatch.setattr(engine.planner, "observe", observe_timed)
    complete(engine, random_prompts(1, 10, 20), GREEDY)
    told = {bool(outcome.drafted.any()): (outcome.draft_s, outcome.verify_s) for outcome in policy.outcomes[:-3]}
    untold = {True: (0.0, 0.0), False: (0.0, 0.0)}
    assert told == (untold if is_cold or is_padded else {True: (1.5, 5.0), False: (1.0, 5.0)})
    assert any(outcome.step_s > 0 for outcome in policy.outcomes) != is_cold
