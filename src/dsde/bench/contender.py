"""Whoever takes part in a comparison: given the same requests as the others, says what came out and how long it took.

Here also the contenders that are policies of ours, each on an engine of its own over shared weights. Policies keep what
they learn from round to round, as in a server; prompts are new to the KV cache in every round.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from dsde.bench.results import Counts, Round
from dsde.core.call_room import call_with_room
from dsde.core.outputs import RequestOutput
from dsde.core.params import SamplingParams
from dsde.engine.llm import LLM
from dsde.engine.metrics import EngineMetrics

Advance = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Task:
    """One request of a cell."""

    kind: str
    text: str
    prompt: list[int]
    params: SamplingParams


@dataclass(slots=True)
class Turn:
    """What one contender did in one round."""

    round: Round
    answers: list[list[int]]
    lossless: bool = True


class Contender(Protocol):
    name: str
    most_places: int | None
    """largest batch it can do; None: any"""

    def take_turn(self, tasks: Sequence[Task], places: int, arrivals: Sequence[float] | None, advance: Advance) -> Turn:
        """Answer all tasks, at most `places` at a time, none before its arrival; `advance` is called for each."""

    def close(self) -> None:
        """Give back what it holds."""


class PolicyContender:
    """One of our policies."""

    most_places: int | None = None

    def __init__(self, name: str, llm: LLM) -> None:
        self.name = name
        self.llm = llm

    def take_turn(self, tasks: Sequence[Task], places: int, arrivals: Sequence[float] | None, advance: Advance) -> Turn:
        engine = self.llm.engine
        engine.scheduler.pool.forget_all()
        before = deepcopy(engine.metrics)
        drive: Drive[RequestOutput] = Drive(engine, tasks, places, arrivals, advance)
        try:
            seconds = call_with_room(drive.run)
        finally:
            drive.abandon()
        outputs = [drive.outputs[i] for i in range(len(tasks))]
        metrics = [output.metrics for output in outputs]
        counts = count_between(before, engine.metrics)
        counts.num_decodes = sum(one.num_steps - 1 for one in metrics)
        answers = [output.outputs[0].token_ids for output in outputs]
        result = Round(
            seconds=seconds,
            num_tokens=[len(answer) for answer in answers],
            shares_s=drive.shares_s,
            first_token_s=[late + one.first_token_s for late, one in zip(drive.late_s, metrics, strict=True)],
            total_s=[late + one.total_s for late, one in zip(drive.late_s, metrics, strict=True)],
            counts=counts,
        )
        return Turn(result, answers, all(one.lossless for one in metrics))

    def close(self) -> None:
        pass


class HasId(Protocol):
    request_id: str


Output = TypeVar("Output", bound=HasId)
CoOutput = TypeVar("CoOutput", bound=HasId, covariant=True)


class DrivenStep(Protocol[CoOutput]):
    @property
    def finished(self) -> Sequence[CoOutput]: ...


class Driven(Protocol[CoOutput]):
    """What a `Drive` needs of an engine, ours or a peer's."""

    def add(self, prompt: list[int], params: SamplingParams) -> str:
        """Queue a request; returns its id."""

    def step(self) -> DrivenStep[CoOutput]:
        """Advance everybody."""

    def abort(self, request_id: str) -> object:
        """End a request now."""


class Drive(Generic[Output]):
    """Feeds an engine and watches the clock: the time of every step is shared evenly by those who run in it."""

    def __init__(
        self,
        engine: Driven[Output],
        tasks: Sequence[Task],
        places: int,
        arrivals: Sequence[float] | None,
        advance: Advance,
    ) -> None:
        self.engine, self.tasks, self.places, self.arrivals, self.advance = engine, tasks, places, arrivals, advance
        self.waiting = deque(range(len(tasks)))
        self.running: dict[str, int] = {}
        self.outputs: dict[int, Output] = {}
        self.shares_s = [0.0] * len(tasks)
        self.late_s = [0.0] * len(tasks)
        """between arrival and a free place"""

    def run(self) -> float:
        """Seconds from the first arrival to the end of the last request."""
        began = mark = time.perf_counter()
        idle_s = 0.0
        while self.waiting or self.running:
            self._admit(time.perf_counter() - began)
            everybody = list(self.running.values())
            if everybody:
                for output in self.engine.step().finished:
                    self.outputs[self.running.pop(output.request_id)] = output
                    self.advance()
            elif self.arrivals is not None:
                time.sleep(max(0.0, self.arrivals[self.waiting[0]] - (time.perf_counter() - began)))
            now = time.perf_counter()
            spent_s, mark = now - mark, now
            for place in everybody:
                self.shares_s[place] += spent_s / len(everybody)
            idle_s += 0.0 if everybody else spent_s
        # Waiting for somebody to come is nobody's own time.
        self.shares_s = [share + idle_s / len(self.tasks) for share in self.shares_s]
        return mark - began

    def abandon(self) -> None:
        """After an interruption: nobody runs any more."""
        for request_id in self.running:
            self.engine.abort(request_id)

    def _admit(self, now: float) -> None:
        while self.waiting and len(self.running) < self.places:
            place = self.waiting[0]
            if self.arrivals is not None:
                if self.arrivals[place] > now:
                    return
                self.late_s[place] = now - self.arrivals[place]
            task = self.tasks[place]
            self.running[self.engine.add(task.prompt, task.params)] = place
            self.waiting.popleft()


def count_between(before: EngineMetrics, after: EngineMetrics) -> Counts:
    reached = [
        count - (before.num_draft_tokens_per_pos[place] if place < len(before.num_draft_tokens_per_pos) else 0)
        for place, count in enumerate(after.num_draft_tokens_per_pos)
    ]
    by_length = [count - beyond for count, beyond in zip(reached, [*reached[1:], 0], strict=False)]
    while by_length and by_length[-1] == 0:
        by_length.pop()
    return Counts(
        num_target_passes=after.num_steps - before.num_steps,
        num_draft_passes=after.num_draft_passes - before.num_draft_passes,
        num_drafts=after.num_drafts - before.num_drafts,
        num_draft_tokens=after.num_draft_tokens - before.num_draft_tokens,
        num_accepted_tokens=after.num_accepted_tokens - before.num_accepted_tokens,
        drafts_by_length=by_length,
        num_host_steps=after.num_host_steps - before.num_host_steps,
    )
