"""A rehearsal: an engine serves made-up requests before real ones come, and nobody waits for what happens but once.

On a GPU the first passes of a shape are many times as slow as all later ones, since they are captured, and a step whose
kernels have to be compiled takes up to seconds. So batches of many sizes go through what a policy may ask for: nobody
drafts, or everybody, or a few of many whose drafts have something to read first; drafts go on, or a rule ends them,
with or without the host; and somebody joins meanwhile.
Nothing of it is left but shapes. Knows nothing of these, nor of the policy that comes after it but which signals it
needs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from dsde.core.params import SamplingParams
from dsde.core.sequence import Sequence
from dsde.core.stops import StopByWorth
from dsde.drafting.foresight import Foresight
from dsde.engine.engine import Engine
from dsde.engine.executor import MOST_ALONE
from dsde.engine.metrics import EngineMetrics
from dsde.engine.planning import Planner
from dsde.engine.scheduler import blocks_for
from dsde.models.batch import BLOCK_SIZE
from dsde.models.buckets import MOST_GRAPH_TOKENS, bucket
from dsde.policies import BatchView, Need, Outcome, Plan, Policy

NUM_PROMPT_TOKENS = 4 * BLOCK_SIZE + 1
"""of a made-up request: as much as the draft of one may have to read"""
NUM_MORE_TOKENS = 16 * BLOCK_SIZE
"""that it has memory for beside them"""
NUM_STEPS = 3
"""of each kind: the first was under way already, the second compiles, the third captures"""
WAYS = (
    SamplingParams(temperature=0, ignore_eos=True),
    SamplingParams(temperature=1, ignore_eos=True, seed=0),
    SamplingParams(temperature=1, top_p=0.9, ignore_eos=True, seed=0),
)
"""of drawing tokens, each of which has kernels of its own"""


class Act(NamedTuple):
    length: int = 0
    """of a draft, at most"""
    usual: int | None = None
    """at which a rule ends it; None: there is no rule"""
    num_missed: int = 1
    """tokens that the draft has to read first, the newest among them"""
    num_drafting: int | None = None
    """None: all"""

    def suits(self, size: int) -> bool:
        """Whether so many requests might do it: far beyond the largest graph drafts are not as long."""
        longest = self.length if self.usual is None else self.usual
        num_read = (size if self.num_drafting is None else self.num_drafting) * self.num_missed
        return size * (1 + longest) <= 2 * MOST_GRAPH_TOKENS and num_read <= MOST_GRAPH_TOKENS


NOBODY = Act()
ACTS = (
    NOBODY,
    Act(length=16, usual=16),
    Act(length=8, usual=4),
    Act(length=2, usual=1),
    Act(length=4),
    Act(length=2),
    *(Act(length=1, num_missed=missed) for missed in (4, 16, 64)),
    *(Act(4 // few, num_missed=missed, num_drafting=few) for few in (1, 2, 4) for missed in (4, 16, 64)),
)


ACTS_ALONE = (Act(length=16, usual=8), Act(length=8, usual=2))
"""of few, that the device goes through without the host"""
ACTS_WITH_COMPANY = (NOBODY, *(Act(length) for length in (8, 4, 2, 1)))
"""while somebody joins"""
NUM_OF_COMPANY = (BLOCK_SIZE, 4 * BLOCK_SIZE, 16 * BLOCK_SIZE)
"""tokens of whose prompt"""


class Script(Policy):
    """Has drafts made as it is told to, and learns nothing."""

    def __init__(self, needs: Need) -> None:
        self.needs = needs
        self.act = NOBODY

    def plan(self, batch: BatchView) -> Plan:
        act, num = self.act, batch.slots.size
        is_drafting = np.arange(num) < (num if act.num_drafting is None else act.num_drafting)
        plan = Plan.wanting(np.where(is_drafting, act.length, 0), batch)
        if act.usual is not None:
            # What a token is worth halves from one to the next, and those up to the usual length earn what they cost.
            price = 0.75 * 0.5**act.usual
            plan.stop = StopByWorth(
                weights=np.zeros(3),
                offsets=np.zeros(num),
                outlooks=np.full(num, 0.5),
                keep_above=price,
                go_on_above=price,
                pass_above=0.0,
                usual=np.where(is_drafting, act.usual, 0),
            )
        return plan

    def observe(self, outcome: Outcome) -> None:
        """Whatever came of it: nobody will ask."""


def rehearse(engine: Engine) -> None:
    """Before its first request. Does nothing where there is nothing to compile or to capture."""
    if not engine.executor.is_asynchronous:
        return
    assert not engine.has_work, "a rehearsal is for an engine that nobody uses yet"
    script = Script(engine.policy.needs)
    sizes, makes_solos = _sizes(engine), engine.executor.makes_solos
    with _played(engine, script):
        for size in reversed(sizes):  # the largest first: whatever needs more room than before is captured anew
            for params in WAYS if size in (sizes[0], sizes[-1]) else WAYS[:1]:
                _perform(engine, script, size, params)
            if size < sizes[-1]:
                _perform_with_company(engine, script, size)
        if sizes and script.needs & Need.DRAFT_SIGNALS:  # or no rule is known that ends drafts
            engine.executor.rehearse(sizes[-1])
        if engine.drafter is not None and makes_solos:
            engine.executor.makes_solos = True
            for size in (size for size in sizes if size <= MOST_ALONE):
                for params in WAYS if size == 1 else WAYS[:1]:
                    _perform_alone(engine, script, size, params)
            engine.executor.makes_solos = False
        # Of all who run some end before others: the rest, in any number, need not draft.
        between = {bucket(count) for count in range(1, min(max(sizes, default=0), MOST_GRAPH_TOKENS) + 1)}
        for size in sorted(between.difference(sizes), reverse=True):
            _perform(engine, script, min(size, sizes[-1]), WAYS[0], ACTS[:1])


def _sizes(engine: Engine) -> list[int]:
    """Powers of two, and as many as run at most, as far as there is memory."""
    num_blocks = blocks_for(NUM_PROMPT_TOKENS + NUM_MORE_TOKENS) + 1
    most = min(engine.config.max_num_seqs, engine.scheduler.pool.num_blocks // num_blocks)
    sizes = {1 << place for place in range(most.bit_length())} | {most}
    return sorted(sizes - {0})


@contextmanager
def _played(engine: Engine, script: Script) -> Iterator[None]:
    """The script instead of the policy; nothing is counted, and nothing stays in the prefix cache."""
    policy, planner, metrics, intake = engine.policy, engine.planner, engine.metrics, engine.intake
    num_calm = engine.num_calm
    # A copy counts these requests, by whose numbers others are sampled that bring no seed.
    engine.policy, engine.metrics, engine.intake = script, EngineMetrics(), copy(intake)
    engine.planner = Planner(script, engine.scheduler, engine.drafter, engine.metrics)
    engine.planner.num_ahead = planner.num_ahead
    drafter = getattr(engine.executor, "drafter", None)
    runners = [owner.passes for owner in (engine.executor, drafter) if owner is not None and hasattr(owner, "passes")]
    for runner in runners:
        runner.makes_do = False
    makes_solos = engine.executor.makes_solos
    engine.executor.makes_solos = False  # what the host does without them is rehearsed as well
    try:
        yield
    finally:
        for runner in runners:
            runner.makes_do = True
        engine.executor.makes_solos = makes_solos
        try:
            _disperse(engine)  # lands what is under way
        finally:
            engine.policy, engine.planner, engine.metrics, engine.intake = policy, planner, metrics, intake
            engine.num_calm = num_calm
            engine.scheduler.pool.forget_all()
            if drafter is not None:
                drafter.foresight = Foresight()  # a script is obeyed to the letter


def _perform(engine: Engine, script: Script, size: int, params: SamplingParams, acts: tuple[Act, ...] = ACTS) -> None:
    """Everything that so many requests may do by themselves."""
    sequences = _gather(engine, script, size, params)
    for act in acts if engine.drafter is not None else acts[:1]:
        if not act.suits(size):
            continue
        if min(sequence.num_left for sequence in sequences) <= 2 * NUM_STEPS * (1 + act.length):
            _disperse(engine)  # before they end, one by one
            sequences = _gather(engine, script, size, params)
        # Who has something to read has read it after one step.
        num_times, num_steps = (1, NUM_STEPS) if act.num_missed == 1 else (NUM_STEPS, 1)
        for _ in range(num_times):
            script.act = NOBODY
            _step(engine)
            for sequence in sequences:  # as if nobody had drafted for so long
                num_read = max(sequence.num_tokens - act.num_missed, 0)
                sequence.num_draft_computed = min(sequence.num_draft_computed, num_read)
            script.act = act
            for _ in range(num_steps):
                _step(engine)
    _disperse(engine)


def _perform_alone(engine: Engine, script: Script, size: int, params: SamplingParams) -> None:
    """What the device goes through without the host, if it may."""
    for act in ACTS_ALONE:
        _gather(engine, script, size, params)
        script.act = act
        for _ in range(NUM_STEPS):
            _step(engine)
        _disperse(engine)


def _perform_with_company(engine: Engine, script: Script, size: int) -> None:
    """What they may do while somebody joins them."""
    _gather(engine, script, size, WAYS[0])
    rng = np.random.default_rng(size)
    for act in ACTS_WITH_COMPANY if engine.drafter is not None else ACTS_WITH_COMPANY[:1]:
        script.act = act
        for count in NUM_OF_COMPANY:
            if not act.suits(size) or count >= engine.intake.max_model_len:
                continue
            for _ in range(NUM_STEPS):
                prompt = rng.integers(0, engine.intake.vocab_size, count)
                engine.add(prompt.tolist(), replace(WAYS[0], max_tokens=1))
                _step(engine)
    _disperse(engine)


def _gather(engine: Engine, script: Script, size: int, params: SamplingParams) -> list[Sequence]:
    """So many requests whose prompts have been read."""
    rng = np.random.default_rng(size)
    num_prompt_tokens = max(min(NUM_PROMPT_TOKENS, engine.intake.max_model_len // 2), 1)
    prompts = rng.integers(0, engine.intake.vocab_size, (size, num_prompt_tokens))
    params = replace(params, max_tokens=NUM_MORE_TOKENS)
    requests = [engine.requests[engine.add(prompt.tolist(), params)] for prompt in prompts]
    sequences = [request.completions[0].sequence for request in requests]
    script.act = NOBODY
    while any(sequence.num_output_tokens == 0 for sequence in sequences):
        engine.step()
    return sequences


def _disperse(engine: Engine) -> None:
    for request_id in list(engine.requests):
        engine.abort(request_id)
    engine.step()


def _step(engine: Engine) -> None:
    if engine.has_work:  # small models have no room for all acts
        engine.step()
