"""Steps that a device makes alone: the same drafts and texts as if the host had been asked, whatever happens."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

pytest.importorskip("triton")

import plain_kernels
from dsde import RequestOutput, SamplingParams
from dsde.core.stops import Stop, StopByWorth
from dsde.device.program import Program, ProgramError
from dsde.drafting import device as drafting_device
from dsde.drafting.foresight import Foresight
from dsde.drafting.ruling import Ruling
from dsde.drafting.sequence_table import COUNTERS_PER_STEP
from dsde.engine import device_executor, solo
from dsde.engine.clock import Timing
from dsde.engine.device_executor import DeviceExecutor
from dsde.engine.engine import Engine
from dsde.engine.executor import MOST_ALONE, Seconds
from dsde.engine.scheduler import Schedule
from dsde.engine.solo import SoloSetting
from dsde.models.batch import BLOCK_SIZE, pack
from dsde.models.decoder import Decoder
from dsde.policies import BatchView, Plan
from dsde.sampling.draw_mode import DrawMode
from test_device_engine import (
    DEVICE,
    HAS_CUDA,
    Ruled,
    Way,
    check_nothing_is_held,
    check_same_outcomes,
    kernels,
    model,
    random_work,
    rule_by_worth,
    tokens_of,
    use_device,
    way,
)
from test_lossless_distribution import PROMPT, TOO_UNLIKELY, with_seed
from test_lossless_greedy import answers_together, check_same
from tiny import make_engine, run, tiny_model

__all__ = ["kernels", "way"]  # fixtures


def executor_of(engine: Engine) -> DeviceExecutor:
    assert isinstance(engine.executor, DeviceExecutor)
    return engine.executor


@pytest.mark.parametrize(
    ("count", "draft"), [(1, "close"), (1, "far"), (2, "close"), (3, "far"), (5, "close"), (8, "far")]
)
def test_drafts_end_where_they_do_with_a_host(way: Way, count: int, draft: str) -> None:
    """Lengths, passes, signals and verdicts: all that a policy is told."""
    params = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
    work = [([3 + i, 1, 4, 1, 5][: 5 - i % 5], params) for i in range(count)]
    way.monkeypatch.setattr(device_executor, "_MOST_BY_HEART", 0)
    way.monkeypatch.setattr(Foresight, "is_sure", lambda *_: False)
    way.monkeypatch.setattr(Foresight, "is_sure_of_end", lambda *_: False)
    outcomes, texts = [], []
    for makes_solos in (True, False):
        policy = Ruled(rule_of_many_lengths, length=7)
        engine = make_engine(model("target", DEVICE), model(draft, DEVICE), policy, max_num_seqs=count)
        executor = executor_of(engine)
        executor.makes_solos = makes_solos
        ids = [engine.add(*one) for one in work]
        done = run(engine)
        texts.append(tokens_of([done[name] for name in ids]))
        outcomes.append(policy.outcomes)
        assert (executor.num_solos > len(policy.outcomes) // 3) == makes_solos
        check_nothing_is_held(engine)
    assert texts[0] == texts[1] == tokens_of(way.alone(work))
    # A step in which nobody has room for a draft is none with a host; else they are the same to the last.
    outcomes = [[outcome for outcome in each if outcome.drafted.any()] for each in outcomes]
    check_same_outcomes(*outcomes)
    lengths = {int(length) for outcome in outcomes[0] for length in outcome.drafted}
    assert len(lengths) > 2


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("greedy", [True, False])
def test_text_is_the_targets_whatever_comes_and_goes(way: Way, seed: int, greedy: bool) -> None:
    """Requests of all kinds that join, end and are preempted; plans that change their minds."""
    work = random_work(seed=30 + seed, greedy=greedy, count=30 if HAS_CUDA else 7)
    work = [(prompt, replace(params, max_tokens=20 * (1 + i % 3))) for i, (prompt, params) in enumerate(work)]
    rule = rule_of_many_lengths
    policy = Ruled(rule, rule, rule, None, rule, length=7)
    rests = np.random.default_rng(seed)

    def plan(batch: BatchView, plan=policy.plan) -> Plan:  # type: ignore[no-untyped-def]
        return Plan.wanting(0, batch) if rests.random() < 0.1 else plan(batch)

    policy.plan = plan  # type: ignore[method-assign]
    engine = way.engine("close", policy, max_num_seqs=seed, max_num_batched_tokens=40)
    alone = way.alone(work) if greedy else way.alone_on_device(work)
    check_same(alone, answers_together(engine, work, seed=seed))
    executor = executor_of(engine)
    assert executor.num_solos >= 3
    assert executor.num_dropped >= 1
    assert executor.num_by_heart >= 1 or (greedy and seed == 2), "logits are wanted there all the time"
    check_nothing_is_held(engine)


def note_rows(way: Way) -> list[tuple[int, ...]]:
    """Of every step made alone that counts, for whom of those it was made for."""
    taken: list[tuple[int, ...]] = []
    take = DeviceExecutor._take_solo

    def noted(executor: DeviceExecutor, made: solo.Solo, work: Schedule, *rest: Any) -> Any:
        rows = made.rows_of(work.decodes)
        assert rows is not None
        taken.append((len(made.flight.judged), *rows.tolist()))
        return take(executor, made, work, *rest)

    way.monkeypatch.setattr(DeviceExecutor, "_take_solo", noted)
    return taken


@pytest.mark.parametrize("how", ["its length", "a token", "an abort"])
@pytest.mark.parametrize("num_waiting", [0, 3])
def test_a_step_counts_for_those_who_are_left(way: Way, how: str, num_waiting: int) -> None:
    """Whoever ends in the step before: the others go on without a rejection of a draft that equals its target, and who
    joins begins a step later."""
    taken = note_rows(way)
    policy = Ruled(rule_of_many_lengths, length=7)
    engine = way.engine("target", policy, max_num_seqs=4)
    params = SamplingParams(temperature=0, max_tokens=70, ignore_eos=True)
    work = [([3 + i, 1, 4, 1, 5], params) for i in range(4 + num_waiting)]
    texts = [text for [text] in tokens_of(way.alone(work))]
    if how == "its length":
        work[1] = (work[1][0], replace(params, max_tokens=23))
        texts[1] = texts[1][:23]
    if how == "a token":
        end = next(token for place, token in enumerate(texts[1]) if place > 8 and token not in texts[1][:place])
        work[1] = (work[1][0], replace(params, stop_token_ids=[end]))
        texts[1] = texts[1][: texts[1].index(end) + 1]
    names = [engine.add(*one) for one in work]
    done = {}
    while engine.has_work:
        done |= {output.request_id: output for output in engine.step().finished}
        request = engine.requests.get(names[1])
        if how == "an abort" and request is not None and request.completions[0].sequence.num_output_tokens > 20:
            done[names[1]] = engine.abort(names[1])
    found = [text for [text] in tokens_of([done[name] for name in names])]
    if how == "an abort":
        texts[1] = texts[1][: len(found[1])]
    if how == "a token":
        found[1], texts[1] = found[1][: len(texts[1]) - 1], texts[1][:-1]
    assert found == texts
    assert (4, 0, 2, 3) in taken
    executor = executor_of(engine)
    assert executor.num_dropped <= 1 + num_waiting, "when all who are left end"
    for outcome in policy.outcomes:
        rooms_were_short = outcome.accepted < outcome.drafted
        assert rooms_were_short.sum() <= 1, "but for who has ended"
        assert outcome.num_draft_passes <= outcome.drafted.max(initial=0) + 1
    check_nothing_is_held(engine)


def klds_by_place(output: RequestOutput) -> dict[int, float]:
    """Of tokens whose draft had stood before them, so that they follow on the text, wherever it was drafted from."""
    steps = output.metrics.trace or ()
    return {step.num_tokens + i: step.klds[i] for step in steps for i in range(min(step.accepted + 1, step.drafted))}


def test_a_step_for_fewer_than_it_was_made_for_is_no_measure(way: Way) -> None:
    """Nor are the divergences of others in it those of who is left."""
    taken = note_rows(way)
    # Where there is no clock nothing takes any time.
    way.monkeypatch.setattr(Timing, "seconds_alone", lambda *_: Seconds(draft=1.0, target=1.0))
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    prompts = [[3 + i, 1, 4, 1, 5] for i in range(3)]
    policy = Ruled(rule_of_many_lengths, length=7)
    engine = way.engine("close", policy, max_num_seqs=3)
    names = [engine.add(prompt, params, trace=True) for prompt in prompts]
    done: dict[str, RequestOutput] = {}
    while engine.has_work:
        done |= {output.request_id: output for output in engine.step().finished}
        if len(taken) == 4 and names[0] in engine.requests:
            engine.abort(names[0])
    assert taken[4] == (3, 1, 2)
    by_rule = [outcome for outcome in policy.outcomes if not outcome.is_by_heart]
    partial = next(outcome for outcome in by_rule if outcome.slots.size == 2)
    assert partial.draft_s == partial.verify_s == 0.0
    assert sum(outcome.verify_s > 0 for outcome in by_rule) > 5
    for name, prompt in zip(names[1:], prompts[1:], strict=True):
        alone = way.engine("close", Ruled(rule_of_many_lengths, length=7), max_num_seqs=1)
        alone.add(prompt, params, trace=True)
        [output] = run(alone).values()
        found, expected = klds_by_place(done[name]), klds_by_place(output)
        common = sorted(found.keys() & expected.keys())
        assert len(common) > 20
        np.testing.assert_allclose([found[i] for i in common], [expected[i] for i in common], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("usual", [(0, 2), (0, 0)])
def test_by_heart_everybody_reads_on(way: Way, usual: tuple[int, int]) -> None:
    """Whoever did not could not be in a step that the device makes alone."""

    def rule(count: int) -> Stop:
        return replace(rule_always(count), usual=np.array(usual[:count]))  # type: ignore[type-var]

    engine = way.engine("target", Ruled(rule, length=3), max_num_seqs=2)
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    work = [([1, 2, 3 + i], params) for i in range(2)]
    check_same(way.alone(work), answers_together(engine, work, seed=0))
    executor = executor_of(engine)
    assert 1 <= executor.num_by_heart <= 2
    assert executor.num_solos > 8


def test_a_plan_for_more_is_not_repeated_where_somebody_ends(way: Way) -> None:
    """Although the policy would have another one, and a step has been made by the last."""
    taken = note_rows(way)
    policy = Ruled(rule_of_many_lengths, length=7)
    engine = way.engine("target", policy, max_num_seqs=3)
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    work = [([3 + i, 1, 4], params) for i in range(3)]
    names = [engine.add(*one) for one in work]
    while len(taken) < 4:
        engine.step()
    assert executor_of(engine)._solo is not None
    engine.abort(names[0])
    policy.rules_on = lambda: False  # type: ignore[method-assign]
    engine.step()
    engine.step()
    assert taken[4] == (3, 1, 2)
    assert all(outcome.slots.size == outcome.drafted.size for outcome in policy.outcomes)
    done = run(engine)
    assert tokens_of([done[name] for name in names[1:]]) == tokens_of(way.alone(work[1:]))


def test_who_joins_begins_a_step_later(way: Way) -> None:
    """But not for ever: behind the step that had been made."""
    policy = Ruled(rule_of_many_lengths, length=7)
    engine = way.engine("target", policy, max_num_seqs=2)
    for i in range(4):
        engine.add([3 + i, 1, 4], SamplingParams(temperature=0, max_tokens=30 + 20 * i, ignore_eos=True))
    num_held = 0
    while engine.has_work:
        engine.step()
        num_held = num_held + 1 if engine.scheduler.has_room else 0
        assert num_held <= 2
    check_nothing_is_held(engine)


class Expecting(Ruled):
    """Notes what its rules expect."""

    def __init__(self) -> None:
        super().__init__(rule_of_many_lengths, length=7)
        self.expected: list[np.ndarray] = []

    def plan(self, batch: BatchView) -> Plan:
        plan = super().plan(batch)
        assert isinstance(plan.stop, StopByWorth)
        assert plan.stop.usual is not None
        self.expected.append(np.minimum(plan.lengths, plan.stop.usual))
        return plan


def test_what_the_device_cannot_make_alone_is_drafted_by_heart(way: Way) -> None:
    """As far as the rule expects, without asking it; which is no measure of what a draft by it takes."""
    policy = Expecting()
    engine = way.engine("close", policy, max_num_seqs=3)
    params = SamplingParams(temperature=0, ignore_eos=True)
    work = [([1, 2, 3 + i], replace(params, max_tokens=40 + 11 * (i % 3))) for i in range(9)]
    check_same(way.alone(work), answers_together(engine, work, seed=0))
    executor = executor_of(engine)
    assert executor.num_by_heart > device_executor._MOST_BY_HEART, "not for once: whenever somebody joins"
    assert executor.num_solos > executor.num_by_heart
    by_heart = [(o, lengths) for o, lengths in zip(policy.outcomes, policy.expected, strict=True) if o.is_by_heart]
    assert len(by_heart) == executor.num_by_heart
    for outcome, lengths in by_heart:
        np.testing.assert_array_equal(outcome.drafted, lengths)
        assert outcome.draft_s == outcome.verify_s == 0.0
    check_nothing_is_held(engine)


@pytest.mark.parametrize("how", ["logits wanted", "a length asked for", "not made alone"])
def test_a_rule_is_asked_where_no_step_is_made_alone(way: Way, how: str) -> None:
    """Or nobody would ever learn what it takes."""
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    work = [([1, 2, 3], params), ([1, 2, 4], params)]
    if how == "logits wanted":
        work = [(prompt, replace(params, logprobs=1)) for prompt, _ in work]
    if how == "a length asked for":
        work[1] = ([1, 2, 4], replace(params, speculation=2))
    policy = Ruled(rule_of_many_lengths, length=7)
    engine = way.engine("close", policy, max_num_seqs=2)
    executor = executor_of(engine)
    executor.makes_solos = how != "not made alone"
    for one in work:
        engine.add(*one)
    run(engine)
    assert executor.num_by_heart <= (0 if how != "a length asked for" else 2)
    assert {batch.has_whole_passes for batch in policy.batches} == {how == "a length asked for"}
    assert sum(not outcome.is_by_heart for outcome in policy.outcomes) > 5


def test_a_step_that_others_took_the_memory_of_is_dropped(way: Way) -> None:
    """Blocks beyond a request's tokens may be given to others, and it gets new ones."""
    way.monkeypatch.setattr(device_executor, "_MOST_BY_HEART", 0)
    engine = way.engine("target", Ruled(rule_always, length=7), max_num_seqs=2)
    executor = executor_of(engine)
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    name = engine.add([1, 2, 3], params)
    for _ in range(5):
        engine.step()
    assert executor._solo is not None
    sequence = engine.requests[name].completions[0].sequence
    before = executor.num_dropped
    # Away with what lies beyond its tokens, and somebody else is given that.
    engine.scheduler._keep(sequence, 0)
    taken = engine.scheduler.pool.allocate(3)
    engine.step()
    engine.step()
    assert executor.num_dropped == before + 1
    engine.scheduler.pool.release(taken)
    done = run(engine)
    assert tokens_of([done[name]]) == tokens_of(way.alone([([1, 2, 3], params)]))


def test_whoever_wants_to_see_logits_keeps_the_host_busy(way: Way) -> None:
    params = SamplingParams(temperature=0, max_tokens=24, logprobs=2)
    work = [([5, 6, 7], params)]
    engine = way.engine("close", Ruled(rule_by_worth))
    (alone,) = way.alone(work)
    (output,) = answers_together(engine, work, seed=0)
    assert executor_of(engine).num_solos == 0
    for mine, expected in zip(output.outputs[0].logprobs or [], alone.outputs[0].logprobs or [], strict=True):
        assert mine.keys() == expected.keys()


def test_rules_of_the_moment_are_not_used_for_another(way: Way) -> None:
    """One that does not say what it expects is meant for its own step."""

    def rule(count: int) -> Stop:
        return replace(rule_by_worth(count), usual=None)  # type: ignore[type-var]

    engine = way.engine("close", Ruled(rule))
    work = [([5, 6, 7], SamplingParams(temperature=0, max_tokens=24))]
    check_same(way.alone(work), answers_together(engine, work, seed=0))
    assert executor_of(engine).num_solos == 0


@pytest.mark.parametrize("ends", [(29, 120), (60, 61, 90), (16, 33, 50, 120)])
def test_who_has_no_room_left_writes_nothing_while_others_draft_on(way: Way, ends: tuple[int, ...]) -> None:
    """A draft that knows everything is never wrong, unless somebody else writes to its memory."""
    work = [
        ([1, 2, 3 + i], SamplingParams(temperature=0, max_tokens=end, ignore_eos=True)) for i, end in enumerate(ends)
    ]
    engine = way.engine("target", Ruled(rule_always, length=7), max_num_seqs=len(ends))
    check_same(way.alone(work), answers_together(engine, work, seed=0))
    assert executor_of(engine).num_solos > 3
    if not HAS_CUDA:  # where sums may be made in another order
        assert engine.metrics.num_accepted_tokens == engine.metrics.num_draft_tokens


class RuledWithRests(Ruled):
    """Of whom some do not draft, for some steps."""

    def __init__(self, seed: int, num_steps: int) -> None:
        super().__init__(rule_always, length=7)
        self.rng, self.num_steps, self.number = np.random.default_rng(seed), num_steps, 0
        self.drafts = np.ones(64, dtype=bool)

    def plan(self, batch: BatchView) -> Plan:
        plan = super().plan(batch)
        if self.number % self.num_steps == 0:
            self.drafts = self.rng.random(64) < 0.6
        self.number += 1
        plan.lengths = np.where(self.drafts[batch.slots], plan.lengths, 0)
        return plan


@pytest.mark.parametrize("num_seqs", [2, 8])
@pytest.mark.parametrize("num_steps", [1, 4])
def test_who_does_not_draft_rides_along_and_misses_nothing(way: Way, num_seqs: int, num_steps: int) -> None:
    """Whether its draft had read everything before or not: one that knows everything is never wrong afterwards."""
    work = [
        ([1, 2, 3 + i], SamplingParams(temperature=0, max_tokens=40 + 9 * (i % 4), ignore_eos=True))
        for i in range(num_seqs + 3)
    ]
    policy = RuledWithRests(num_seqs, num_steps)
    engine = way.engine("target", policy, max_num_seqs=num_seqs)
    check_same(way.alone(work), answers_together(engine, work, seed=0))
    executor = executor_of(engine)
    # Who wants to draft and has missed something has to be waited for.
    assert executor.num_solos > (3 if num_steps > 1 else 0)
    num_mixed = sum(0 < np.count_nonzero(outcome.drafted) < len(outcome.drafted) for outcome in policy.outcomes)
    assert num_mixed > len(policy.outcomes) / 6
    if not HAS_CUDA:  # where sums may be made in another order
        assert engine.metrics.num_accepted_tokens == engine.metrics.num_draft_tokens
    check_nothing_is_held(engine)


class RuledAtTimes(Ruled):
    """For three steps of four, and says so beforehand or not."""

    def __init__(self, says_so: bool) -> None:
        super().__init__(rule_always, length=3)
        self.says_so, self.number = says_so, 0

    def plan(self, batch: BatchView) -> Plan:
        plan = super().plan(batch)
        self.number += 1
        if self.number % 4 == 0:
            return Plan.wanting(0, batch)
        return plan

    def rules_on(self) -> bool:
        return not self.says_so or self.number % 4 != 3


@pytest.mark.parametrize("says_so", [True, False])
def test_another_plan_is_followed_a_step_later_where_one_has_been_made(way: Way, says_so: bool) -> None:
    way.monkeypatch.setattr(device_executor, "_MOST_BY_HEART", 0)
    policy = RuledAtTimes(says_so)
    engine = way.engine("close", policy, max_num_seqs=2)
    work = [([1, 2, 3 + i], SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)) for i in range(2)]
    check_same(way.alone(work), answers_together(engine, work, seed=0))
    executor = executor_of(engine)
    assert executor.num_solos > 3
    assert (executor.num_dropped <= 1) == says_so  # when the first of the two ends
    drafted = [bool(outcome.drafted.any()) for outcome in policy.outcomes]
    assert drafted[:10] == (
        [True] * 4 + [False] + [True] * 4 + [False] if says_so else ([True] * 3 + [False]) * 2 + [True] * 2
    )
    assert [outcome.is_ruled for outcome in policy.outcomes[:10]] == drafted[:10]
    check_nothing_is_held(engine)


def test_a_plan_that_is_repeated_is_no_longer_than_there_is_room_or_memory_for(way: Way) -> None:
    engine = way.engine("target", Ruled(rule_always, length=7), max_num_seqs=2)
    for i in range(2):
        engine.add([1, 2, 3 + i], SamplingParams(temperature=0, max_tokens=30 + 20 * i, ignore_eos=True))
    for _ in range(3):
        engine.step()
    decodes = engine.scheduler.running
    plan = engine._latest_plan
    assert plan is not None
    assert plan.lengths.tolist() == [7, 7]
    decodes[0].max_tokens = decodes[0].num_output_tokens + 4
    engine.scheduler._keep(decodes[1], 0)
    engine.scheduler.pool.allocate(engine.scheduler.pool.num_free)
    again = engine.planner.repeat(plan, decodes)
    num_spare = len(decodes[1].block_table) * 16 - len(decodes[1].tokens)
    assert again.planned.tolist() == [3, 7]
    assert again.lengths.tolist() == [3, min(num_spare, 7)]
    assert again.batch is plan.batch


def test_a_step_is_made_for_those_who_were_there(way: Way) -> None:
    engine = way.engine("target", Ruled(rule_always, length=3), max_num_seqs=2)
    for i in range(3):
        engine.add([1, 2, 3 + i], SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))
    while executor_of(engine)._solo is None:
        engine.step()
    executor, (first, second) = executor_of(engine), engine.scheduler.running
    assert executor.has_made([first, second])
    assert not executor.has_made([first])  # the other has not ended
    assert not executor.has_made([first, engine.scheduler.waiting[0]])


def test_what_a_step_told_is_read_although_a_program_is_made_behind_it(way: Way) -> None:
    """For longer drafts than before, while the device tells of it."""

    def rules(count: int) -> Stop:
        numbers.append(len(numbers))
        return replace(rule_always(count), usual=np.full(count, 1 if numbers[-1] < 4 else 8))  # type: ignore[type-var]

    numbers: list[int] = []
    way.monkeypatch.setattr(solo, "_SHORT_SOLO", 3)
    policy = Ruled(rules, length=12)
    engine = way.engine("target", policy, max_num_seqs=1)
    work = [([5, 6, 7], SamplingParams(temperature=0, max_tokens=101, ignore_eos=True))]
    check_same(way.alone(work), answers_together(engine, work, seed=0))
    assert executor_of(engine).num_solos > 3
    lengths = {int(outcome.drafted[0]) for outcome in policy.outcomes[2:-2]}
    assert lengths == {3, 12}
    for outcome in policy.outcomes[1:-2]:
        assert outcome.num_draft_passes == outcome.drafted[0], "a draft that never ends early"


def test_a_request_is_made_alone_to_its_end(way: Way) -> None:
    """And no step of it is made twice."""
    engine = way.engine("target", Ruled(rule_always, length=7), max_num_seqs=1)
    for max_tokens in (41, 42, 47, 48):
        work = [([1, 2, 3], SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True))]
        check_same(way.alone(work), answers_together(engine, work, seed=0))
    executor = executor_of(engine)
    # The first step of a request reads its prompt, and nobody has planned for the second before.
    assert executor.num_solos == engine.metrics.num_steps - 2 * 4
    assert executor.num_dropped == 0


def test_books_are_kept_as_with_a_host(way: Way) -> None:
    """What the draft has read, and that nobody drafts what would not fit into its answer."""
    policy = Ruled(rule_always, length=7)
    engine = way.engine("close", policy, max_num_seqs=2)
    names = [engine.add([1, 2, 3 + i], SamplingParams(temperature=0, max_tokens=40 + i)) for i in range(2)]
    sequences = [engine.requests[name].completions[0].sequence for name in names]
    executor = executor_of(engine)
    while engine.has_work:
        num_solos, num_outcomes = executor.num_solos, len(policy.outcomes)
        left = [sequence.num_left for sequence in sequences if sequence.num_left > 0]
        engine.step()
        for outcome in policy.outcomes[num_outcomes:]:
            if len(left) == len(outcome.drafted):
                assert (outcome.drafted < left).all()
        for sequence in sequences if executor.num_solos > num_solos > 0 else []:
            assert len(sequence.tokens) - sequence.num_draft_computed <= 2
    assert executor.num_solos > 3
    assert [sequence.num_output_tokens for sequence in sequences] == [40, 41]


@pytest.mark.skipif(HAS_CUDA, reason="graphs are not looked into")
def test_no_noise_is_used_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a seed: a step's is that of no other, the same for draft and verdict."""
    use_device(monkeypatch)
    plain_kernels.install(monkeypatch, with_graphs=False)
    used: list[tuple[str, int]] = []

    def note(module: Any, name: str) -> None:
        kernel = getattr(module, name)

        def noted(logits: torch.Tensor, given: Any, *args: Any) -> None:
            draws = given.draws if name == "judge" else given
            if draws.modes[0] != DrawMode.PADDING:
                used.append((name, int(draws.counters[0])))
            kernel(logits, given, *args)

        monkeypatch.setattr(module, name, noted)

    note(drafting_device, "sample_drafts")
    note(device_executor, "judge")
    engine = make_engine(model("target", DEVICE), model("close", DEVICE), Ruled(rule_always, length=3))
    engine.add([1, 2, 3], SamplingParams(temperature=1, max_tokens=60, ignore_eos=True))
    run(engine)
    executor = executor_of(engine)
    assert executor.num_solos > 5
    assert executor.num_dropped == 0
    judged = [counter for name, counter in used if name == "judge"]
    assert judged == [step * COUNTERS_PER_STEP for step in range(len(judged))]
    drafted: set[int] = set()
    for name, counter in used[1:]:  # the first is of the prompt
        if name == "judge":
            assert drafted <= {counter}
            drafted = set()
        else:
            drafted.add(counter)


def test_nobody_drafts_beyond_the_drafts_own_longest_context(way: Way) -> None:
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    work = [(list(range(1, 1 + count)), params) for count in (9, 3, 16, 3, 22, 3)]
    engine = way.engine("short context", Ruled(rule_always, length=7), max_num_seqs=2)
    check_same(way.alone(work), answers_together(engine, work, seed=0))
    assert executor_of(engine).num_solos > 0


@pytest.mark.parametrize("length", [5, 12, 20])
def test_who_asks_for_a_length_gets_it(way: Way, length: int) -> None:
    """Beside others who go by a rule."""
    params = SamplingParams(temperature=0, max_tokens=90, ignore_eos=True)
    engine = way.engine("target", Ruled(rule_by_worth, length=7), max_num_seqs=2)
    engine.add([1, 2, 3], replace(params, speculation=length), trace=True)
    engine.add([4, 5, 6], params)
    done = run(engine)
    trace = next(output.metrics.trace for output in done.values() if output.metrics.trace)
    drafted = [record.drafted for record in trace or []]
    assert set(drafted[1:-2]) == {length}
    assert executor_of(engine).num_solos > 3


def test_an_engine_that_nobody_uses_is_gone_at_once(way: Way) -> None:
    """With all its memory, and not at some garbage collection."""
    gc.collect()
    gc.disable()
    try:
        engine = way.engine("close", Ruled(rule_of_many_lengths, rule_of_many_lengths, None), max_num_seqs=2)
        for i in range(3):
            engine.add([1, 2, 3 + i], SamplingParams(temperature=0, max_tokens=40))
        run(engine)
        executor = executor_of(engine)
        assert executor.num_solos > 0
        assert executor.num_dropped > 0
        gone = weakref.ref(executor)
        del engine, executor
        assert gone() is None
    finally:
        gc.enable()


def test_without_memory_for_it_the_host_is_asked(way: Way) -> None:
    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    way.monkeypatch.setattr(SoloSetting, "prepare", fail)
    engine = way.engine("close", Ruled(rule_of_many_lengths))
    work = [([5, 6, 7], SamplingParams(temperature=0, max_tokens=40))]
    with pytest.warns(UserWarning, match="The host is asked at every step: CUDA out of memory"):
        check_same(way.alone(work), answers_together(engine, work, seed=0))
    assert executor_of(engine).num_solos == 0


def test_where_the_driver_refuses_the_host_is_asked(way: Way) -> None:
    def refuse(_: Program) -> None:
        raise ProgramError("cuGraphAddNode failed: CUDA_ERROR_NOT_SUPPORTED.")

    way.monkeypatch.setattr(Program, "finish", refuse)
    policy = Ruled(rule_of_many_lengths)
    engine = way.engine("close", policy)
    work = [([5, 6, 7], SamplingParams(temperature=0, max_tokens=40))] * 2
    with pytest.warns(UserWarning, match="The host is asked at every step: cuGraphAddNode") as warned:
        check_same(way.alone(work), answers_together(engine, work, seed=0))
    assert len(warned) == 1
    assert executor_of(engine).num_solos == 0
    assert engine.metrics.num_accepted_tokens > 0
    assert not policy.batches[-1].has_whole_passes


@pytest.mark.parametrize("count", [1, MOST_ALONE, MOST_ALONE + 1])
def test_who_plans_knows_whether_all_are_in_every_pass(way: Way, count: int) -> None:
    policy = Ruled(rule_of_many_lengths)
    engine = way.engine("close", policy, max_num_seqs=16)
    answers_together(engine, [([5, 6, 7], SamplingParams(temperature=0, max_tokens=20))] * count, seed=0)
    assert max(batch.num_decoding for batch in policy.batches) == count
    assert all(batch.has_whole_passes == (batch.num_decoding <= MOST_ALONE) for batch in policy.batches)


@pytest.mark.parametrize("usual", [0, 1, 2, 7, 15, 16, 20])
def test_the_device_knows_what_a_rule_asks_at_every_depth(usual: int) -> None:
    rule = StopByWorth(np.zeros(3), np.zeros(2), np.full(2, 0.9), 0.1, 0.2, 0.3, np.array([usual, 0]), dearer=0.5)
    expected = [rule.costs(depth) for depth in range(16)]
    np.testing.assert_allclose(Ruling(rule).costs(16), expected, rtol=1e-6)


def rule_of_many_lengths(count: int) -> Stop:
    outlooks = np.linspace(0.7, 0.9, count)
    return StopByWorth(
        np.array([-0.8, 2.0, 1.0]), np.full(count, 2.2), outlooks, 0.2, 0.2, 0.1, np.full(count, 2), 0.05
    )


def rule_always(count: int) -> Stop:
    """Everybody drafts as far as may be."""
    return StopByWorth(np.zeros(3), np.full(count, 50.0), np.full(count, 0.99), 0.01, 0.01, 0.01, np.full(count, 3))


@pytest.mark.parametrize("usual", [3, 6])
def test_long_drafts_have_room(way: Way, usual: int) -> None:
    """Up to 7 tokens, or 15 where drafts are long; and a request ends with exactly as many as it may have."""

    def rule(count: int) -> Stop:
        return replace(rule_always(count), usual=np.full(count, usual))  # type: ignore[type-var]

    policy = Ruled(rule, length=20)
    engine = way.engine("target", policy, max_num_seqs=1)
    work = [([5, 6, 7], SamplingParams(temperature=0, max_tokens=101, ignore_eos=True))]
    check_same(way.alone(work), answers_together(engine, work, seed=0))
    executor = executor_of(engine)
    longest = 15 if usual == 6 else 7
    assert executor.num_solos >= 2
    assert sum(int(outcome.drafted[0]) == longest for outcome in policy.outcomes) >= executor.num_solos - 1


@pytest.mark.parametrize("num_seqs", [1, 2, 4, 8])
@pytest.mark.parametrize("per_item", [1, 2, 4, 16])
def test_attention_has_items_for_all_rows_of_anybody(num_seqs: int, per_item: int) -> None:
    """Programs are for any number of sequences more than half of their size."""
    for longest in (7, 15):
        for size in solo._sizes(num_seqs, longest):
            for count in range(num_seqs // 2 + 1, num_seqs + 1):
                rows_of_one = min(longest + 1, size - count + 1)
                depth = solo.num_items(size, num_seqs, longest, per_item) // num_seqs
                assert depth * per_item >= rows_of_one
                assert depth * num_seqs == solo.num_items(size, num_seqs, longest, per_item)


def chances(model: Decoder, text: list[int]) -> np.ndarray:
    """[tokens, vocabulary] of each token of a text, from a pass of its own."""
    tokens = np.array([*PROMPT, *text[:-1]])
    lengths, rows = np.array([len(tokens)]), np.arange(len(PROMPT) - 1, len(tokens))
    blocks = list(range(-(-len(tokens) // BLOCK_SIZE)))
    logits = model.forward(pack(tokens, lengths, lengths, [blocks], rows, model.device), model.new_cache(len(blocks)))
    return torch.softmax(logits.double(), -1).cpu().numpy()


def p_value_of_texts(texts: list[list[int]], target: Decoder, draft: Decoder) -> float:
    """Whether every token was drawn as by the target after those before it: none of them too often, none for the
    draft's sake, and none because one of the three before it was drawn; by the least likely of these."""
    found = [(chances(target, text), chances(draft, text)) for text in texts]
    p, q = (np.concatenate(each) for each in zip(*found, strict=True))
    everything = np.eye(p.shape[1])
    surprises = everything[np.concatenate(texts)] - p
    of_texts = surprises.reshape(len(texts), -1, p.shape[1])
    before = np.zeros((*of_texts.shape[:2], 3, p.shape[1]))
    for distance in range(1, 4):
        before[:, distance:, distance - 1] = of_texts[:, :-distance]
    spreads = p[:, :, None] * everything - p[:, :, None] * p[:, None]
    p_values = []
    for looks in (np.broadcast_to(everything, spreads.shape), (q - p)[:, None], np.concatenate(before)):
        sums = np.einsum("tlv,tv->l", looks, surprises)
        spread = np.einsum("tlv,tvw,tmw->lm", looks, spreads, looks, optimize=True)
        p_values.append(stats.chi2.sf(sums @ np.linalg.pinv(spread) @ sums, np.linalg.matrix_rank(spread)))
    return min(1.0, len(p_values) * min(p_values))


@pytest.mark.parametrize("seeded", [False, True])
def test_sampled_text_is_distributed_as_the_targets(way: Way, seeded: bool) -> None:
    """Which the device makes alone for the most part; by the ratio rule, and by common noise."""
    params = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True)
    shapes: list[dict[str, Any]] = [{"seed": 3, "layers": 1}, {"seed": 3, "layers": 1, "noise": 0.3}]
    target, draft = (tiny_model(6, device=DEVICE, **shape) for shape in shapes)
    engine = make_engine(target, draft, Ruled(rule_always, length=2), max_num_seqs=3, seed=11)
    for number in range(2000 if HAS_CUDA else 150):
        engine.add(PROMPT, with_seed(params, number) if seeded else params)
    texts = [output.outputs[0].token_ids for output in run(engine).values()]
    executor = executor_of(engine)
    assert executor.num_solos > engine.metrics.num_steps / 6
    assert engine.metrics.num_accepted_tokens < engine.metrics.num_draft_tokens
    on_host = [tiny_model(6, **shape) for shape in shapes]
    with way.host():
        assert p_value_of_texts(texts, *on_host) > TOO_UNLIKELY
        assert p_value_of_texts(texts, *reversed(on_host)) < TOO_UNLIKELY, "text of the draft would do as well"


def test_kernels_make_steps_alone(kernels: Way) -> None:
    """The real ones, interpreted where there is no device."""
    engine = kernels.engine("close", Ruled(rule_by_worth, length=3), max_num_seqs=2)
    work = [([3 + i, 1, 4], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)) for i in range(2)]
    check_same(kernels.alone(work), answers_together(engine, work, seed=0))
    assert executor_of(engine).num_solos > 1
