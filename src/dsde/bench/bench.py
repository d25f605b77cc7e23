"""Measures: for every cell, rounds in which all contenders take turns, so that a noisy machine hurts all alike.

What was found is saved after every round, and a run that finds results of its own setting goes on from there. Texts are
compared with those of `off` in every round. Knows nothing of intervals, tables and files but results.json.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from dsde.bench.arrivals import parse_arrivals
from dsde.bench.contender import Contender, PolicyContender, Task, Turn
from dsde.bench.recorder import trace_task
from dsde.bench.results import Cell, Difference, Findings, Results
from dsde.bench.setting import BASE, CellKey
from dsde.bench.workloads import TRANSITION, load_workload
from dsde.core.errors import InvalidInput
from dsde.core.params import SamplingParams
from dsde.engine.llm import LLM
from dsde.policies import make_policy

_FULL_WARMUPS_ON_GPU = 2
"""a graph is captured at its second use"""


class Watcher(Protocol):
    """Somebody who is told how far it has come."""

    def begin(self, num_requests: int) -> None:
        """So many requests are to be answered in all."""

    def describe(self, doing: str) -> None:
        """What comes next."""

    def advance(self) -> None:
        """One request less."""


@dataclass(slots=True)
class Agenda:
    """What is asked in every cell."""

    tasks: dict[CellKey, list[Task]]
    example: Task
    """the request whose steps are shown"""

    @property
    def longest(self) -> int:
        """tokens of the longest sequence there can be"""
        everybody = [self.example, *(task for tasks in self.tasks.values() for task in tasks)]
        return max(len(task.prompt) + (task.params.max_tokens or 0) for task in everybody)


def make_agenda(results: Results, llm: LLM) -> Agenda:
    setting = results.setting
    for spec in setting.policies:
        make_policy(spec)  # before the work: one of them may be misspelt
    workloads = {name: load_workload(name, setting.seed) for name in setting.workloads}
    tasks = {}
    for key in setting.cells():
        prompts = workloads[key.workload].take(setting.requests_at(key.batch_size))
        tasks[key] = [
            _task(llm, prompt.kind, prompt.text, setting.max_tokens, key.temperature, setting.seed + number)
            for number, prompt in enumerate(prompts)
        ]
    example = load_workload(TRANSITION, setting.seed).prompts[0]
    tokens, temperature = max(setting.max_tokens, 96), setting.temperatures[0]
    return Agenda(tasks, _task(llm, example.kind, example.text, tokens, temperature, setting.seed))


def _task(llm: LLM, kind: str, text: str, max_tokens: int, temperature: float, seed: int) -> Task:
    if llm.tokenizer is None:
        raise InvalidInput("this target has no tokenizer, so it cannot answer prompts")
    if llm.tokenizer.can_chat:
        prompt = llm.chat_prompt([{"role": "user", "content": text}])
    else:
        prompt = llm.tokenizer.encode(text)
    # With a seed a sampled text depends on nothing else: all contenders write the same, and times can be compared.
    params = SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=seed)
    return Task(kind, text, prompt, params)


def make_policy_contenders(results: Results, llm: LLM, longest: int) -> list[Contender]:
    specs = dict.fromkeys((BASE, *results.setting.policies))
    places = max(results.setting.batch_sizes)
    return [
        PolicyContender(spec, llm.with_policy(spec, max_num_seqs=places, max_model_len=longest, kv_cache_bytes=None))
        for spec in specs
    ]


class Bench:
    def __init__(
        self, results: Results, agenda: Agenda, contenders: Sequence[Contender], path: Path | None, watcher: Watcher
    ) -> None:
        self.results, self.agenda, self.contenders = results, agenda, list(contenders)
        self.path, self.watcher = path, watcher
        self._base = next(c for c in contenders if c.name == BASE)
        self._arrivals = parse_arrivals(results.setting.arrival)
        self._began, self._before_s = time.perf_counter(), results.elapsed_s

    def run(self) -> None:
        """Measure what is still to be measured."""
        self.watcher.begin(self._num_requests())
        for key, tasks in self.agenda.tasks.items():
            self._run_cell(key, tasks)
        self._trace()
        self.results.finished = True
        self._save()

    def _run_cell(self, key: CellKey, tasks: list[Task]) -> None:
        cell = self._cell(key, tasks)
        contenders = [c for c in self.contenders if c.name in cell.contenders]
        if cell.num_rounds == self.results.setting.rounds:
            return
        label = f"{cell.name}, batch {key.batch_size}, T {key.temperature:g}"
        for contender in contenders:
            self._warm_up(contender, key, tasks, f"{label}: {contender.name}, warming up")
        while cell.num_rounds < self.results.setting.rounds:
            number = cell.num_rounds
            # Nobody always comes first, or always behind the same one.
            start = number % len(contenders)
            turns: dict[str, Turn] = {}
            for contender in [*contenders[start:], *contenders[:start]]:
                self.watcher.describe(f"{label}: {contender.name}, round {number + 1}")
                times = self._arrivals.times(len(tasks), self.results.setting.seed + number)
                turns[contender.name] = contender.take_turn(tasks, key.batch_size, times, self.watcher.advance)
            self._keep(cell, tasks, turns)
            self._save()

    def _cell(self, key: CellKey, tasks: list[Task]) -> Cell:
        cell = self.results.cell(key)
        if cell is None:
            prompts = [len(task.prompt) for task in tasks]
            cell = Cell(*key, kinds=[task.kind for task in tasks], num_prompt_tokens=prompts, contenders={})
            for contender in self.contenders:
                if _can_take_part(contender, key):
                    compared = isinstance(contender, PolicyContender) or key.temperature == 0
                    cell.contenders[contender.name] = Findings(compared=compared)
            self.results.cells.append(cell)
        return cell

    def _warm_up(self, contender: Contender, key: CellKey, tasks: list[Task], doing: str) -> None:
        """Not timed: kernels are compiled, graphs captured, and policies learn what things cost."""
        self.watcher.describe(doing)
        few, times = self._warmup(contender, key.batch_size, tasks)
        for _ in range(times):
            contender.take_turn(few, key.batch_size, None, self.watcher.advance)

    def _warmup(self, contender: Contender, batch_size: int, tasks: list[Task]) -> tuple[list[Task], int]:
        """What is asked to warm up, and how often."""
        if isinstance(contender, PolicyContender) and self.results.models["device"] == "cuda":
            return tasks, _FULL_WARMUPS_ON_GPU
        return tasks[:batch_size], 1

    def _keep(self, cell: Cell, tasks: list[Task], turns: dict[str, Turn]) -> None:
        own = turns[BASE].answers
        for name, turn in turns.items():
            findings = cell.contenders[name]
            findings.rounds.append(turn.round)
            findings.lossless &= turn.lossless
            known = {difference.request for difference in findings.differences}
            if not findings.compared:
                continue
            for number, (answer, expected) in enumerate(zip(turn.answers, own, strict=True)):
                if answer != expected and number not in known:
                    findings.differences.append(self._difference(number, tasks[number], answer, expected))

    def _difference(self, number: int, task: Task, answer: list[int], expected: list[int]) -> Difference:
        agreed = next((i for i, (a, b) in enumerate(zip(answer, expected, strict=False)) if a != b), None)
        position = min(len(answer), len(expected)) if agreed is None else agreed
        gap = None
        if task.params.greedy and isinstance(self._base, PolicyContender):
            params = SamplingParams(temperature=0, max_tokens=1, logprobs=2)
            [output] = self._base.llm.generate([*task.prompt, *expected[:position]], params)
            entries = (output.outputs[0].logprobs or [{}])[0].values()
            best = sorted((entry.logprob for entry in entries), reverse=True)
            gap = best[0] - best[1] if len(best) > 1 else None
        return Difference(number, position, gap)

    def _trace(self) -> None:
        """Write down every step of the example, or of all requests."""
        setting = self.results.setting
        done = {(trace.contender, trace.workload, trace.temperature, trace.prompt) for trace in self.results.traces}
        for contender in self.contenders:
            if not isinstance(contender, PolicyContender) or contender.name == BASE:
                continue
            tasks = [(TRANSITION, self.agenda.example)]
            if setting.traced == "all":
                tasks = [(key.workload, task) for key, several in self.agenda.tasks.items() for task in several]
            for workload, task in tasks:
                if (contender.name, workload, task.params.temperature, task.text) not in done:
                    self.watcher.describe(f"{contender.name}: the steps of a request")
                    self.results.traces.append(trace_task(contender.name, contender.llm, task, workload))
                self.watcher.advance()

    def _num_requests(self) -> int:
        total = 0
        for key, tasks in self.agenda.tasks.items():
            cell = self.results.cell(key)
            done = 0 if cell is None else cell.num_rounds
            if done == self.results.setting.rounds:
                continue
            for contender in self.contenders:
                if _can_take_part(contender, key):
                    few, times = self._warmup(contender, key.batch_size, tasks)
                    total += len(few) * times + len(tasks) * (self.results.setting.rounds - done)
        num_traced = 1
        if self.results.setting.traced == "all":
            num_traced = sum(map(len, self.agenda.tasks.values()))
        return total + num_traced * sum(isinstance(c, PolicyContender) for c in self.contenders[1:])

    def _save(self) -> None:
        self.results.elapsed_s = self._before_s + time.perf_counter() - self._began
        if self.path is not None:
            self.results.save(self.path)


def _can_take_part(contender: Contender, key: CellKey) -> bool:
    return contender.most_places is None or key.batch_size <= contender.most_places
