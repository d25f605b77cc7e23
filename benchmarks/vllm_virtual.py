"""The vLLM plugin's decisions in virtual time: requests that come together, end one by one and come again.

    python benchmarks/vllm_virtual.py [--pair 8b|qwen] [--acceptance 0.8] [--seeds 6] [--noise 0.05] [--slow-start 1.5]
        [--slow-return 1.5] [--slow-times 1.4]
    python benchmarks/vllm_virtual.py --come-and-go [--pair 8b|qwen] [--acceptance 0.8]

The plugin's controller and policies run as they are, beside a scheduler like vLLM's asynchronous one: one step more is
scheduled before the last is reported, prompts are read up to 8192 tokens a step, finished requests leave when they are
done. What a step takes is made up, close to what was seen on one H200 with vLLM 0.26.0, with noise; whether a token
stands is tossed. Batches, tokens and rounds are those of vllm_plugin.py, whose figures this explains and does not
replace: all that is true here is what the decisions are worth if costs are such. Needs neither a GPU nor vLLM.

With `--come-and-go` as many requests are there all the time, whoever ends is followed by another, and beside tokens/s
it is printed how long the plugin itself thinks in a step, on this machine's clock.

Printed are tokens/s of no speculation, of the plugin's best fixed length and of `auto`, the mean over rounds and seeds,
and the two ratios with their 95 % intervals over seeds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from dsde.integrations.vllm.controller import Controller, Limits
from dsde.integrations.vllm.messages import Directive, Feedback
from dsde.integrations.vllm.support import make_supported
from dsde.policies.verifications import size_of_batch
from intervals import half_width

TOKENS = {1: 192, 8: 128, 64: 96, 256: 64}
"""that each request generates, by batch"""
PROMPT_TOKENS = 64
BATCHED_TOKENS = 8192
GRAPH_TOKENS = 512
NUM_IN_FLIGHT = 2
MEAN_TOKENS = 100
NUM_STEPS = 800
"""of requests that come and go: tokens of each, and steps to learn from, after which twice as many count"""
NUM_SLOW = 3
"""first steps without drafts of a size of batch, with a slow start, or behind drafts, with a slow return"""


NUM_LATE = 512
"""tokens from which on reading what was missed takes its longest, beside what they take themselves"""
SLOW_TIME_S = 2.0
"""seconds that a slow time lasts, and a fast one, on average"""


class Costs(NamedTuple):
    """In milliseconds."""

    verify: tuple[list[float], list[float]]
    """tokens, and what verifying them takes where there is a graph for it"""
    context: tuple[list[float], list[float]]
    """sequences, and what reading their contexts takes besides"""
    ragged: float
    """of a verification of drafts that are not all of one length, at least: there is no whole graph for it"""
    prompt: tuple[float, float]
    """of a step that reads prompts: once, and a token"""
    start: float
    draft: tuple[float, float]
    """of a draft pass: once, and a sequence"""
    catch_up: tuple[float, float]
    """of reading what the draft missed: once, and a token"""
    resume: float
    """by which everything is later if a draft follows on steps without any, beside what is measured of it"""


PAIRS = {
    "8b": Costs(
        verify=([1, 8, 64, 128, 192, 256, 512, 768, 1024], [4.73, 4.75, 5.6, 6.2, 7.3, 8.0, 16.0, 24.0, 32.0]),
        context=([1, 64, 256], [0.0, 0.0, 1.8]),
        ragged=11.0,
        prompt=(6.0, 0.027),
        start=0.2,
        draft=(1.14, 0.0085),
        catch_up=(3.0, 0.0035),
        resume=5.0,
    ),
    "qwen": Costs(
        verify=([1, 8, 64, 128, 192, 256, 512, 768, 1024], [1.93, 2.2, 3.9, 4.6, 5.3, 5.9, 8.5, 12.0, 15.0]),
        context=([1, 64, 256], [0.0, 0.0, 1.8]),
        ragged=8.0,
        prompt=(3.0, 0.006),
        start=0.9,
        draft=(0.7, 0.004),
        catch_up=(3.0, 0.002),
        resume=12.0,
    ),
}


@dataclass
class Request:
    """Of vLLM's, what the plugin looks at."""

    max_tokens: int
    num_computed_tokens: int = 0
    is_prefill_chunk: bool = False
    sampling_params: Any = field(default_factory=lambda: SimpleNamespace(temperature=0.0))
    all_token_ids: list[int] = field(default_factory=lambda: [0] * PROMPT_TOKENS)

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        return PROMPT_TOKENS

    @property
    def is_done(self) -> bool:
        return self.num_tokens >= PROMPT_TOKENS + self.max_tokens


class VirtualVLLM:
    def __init__(
        self,
        policy: str,
        costs: Costs,
        acceptance: float,
        noise: float = 0.0,
        seed: int = 0,
        is_plain: bool = False,
        slow_start: float = 1.0,
        slow_return: float = 1.0,
        slow_times: float = 1.0,
    ) -> None:
        """With `is_plain` as on a CPU: no graphs, and no step is scheduled before the last is reported. The first steps
        without drafts, of every size of batch, take `slow_start` times as long as later ones, and those that come first
        behind drafts `slow_return` times. Half of the time, in turns of some seconds, everything takes `slow_times` as
        long."""
        self.now = 0.0
        limits = Limits(
            max_length=6,
            max_model_len=2048,
            num_in_flight=1 if is_plain else NUM_IN_FLIGHT,
            exact_rooms=is_plain,
            can_skip=True,
            catch_up_budget=BATCHED_TOKENS,
            num_graph_tokens=0 if is_plain else GRAPH_TOKENS,
        )
        self.controller = Controller(make_supported(policy, "draft_model"), limits, clock=lambda: self.now)
        self.costs, self.acceptance, self.noise = costs, acceptance, noise
        self._slow_start, self._slow_return, self._slow_times = slow_start, slow_return, slow_times
        self._is_slow, self._turns_at = False, 0.0
        self._fast_now = 0.0
        """as `now` would be without slow times"""
        self._num_returned = NUM_SLOW
        """steps without drafts since one that verified some"""
        self._was_drafting = False
        self.begun: tuple[float, int] | None = None
        """seconds until all requests had their first token, and how many tokens there were by then"""
        self._nums_plain: Counter[int] = Counter()
        """steps without drafts so far, by size of batch"""
        self.num_emitted = 0
        """tokens so far"""
        self.num_caught_up = 0
        """tokens that the draft has read late so far"""
        self._rng = np.random.default_rng(seed)
        self._count = 0
        self._requests: dict[str, Request] = {}
        self._lengths: dict[str, int] = {}
        self._finished: set[str] = set()

    def generate(self, batch: int, num_tokens: int) -> float:
        """Seconds that so many requests take, of so many tokens each, as they would without slow times: how many of
        these there were is luck, and what is decided in them is not. `begun` says when all had a first token."""
        names = [f"r{self._count + number}" for number in range(batch)]
        self._count += batch
        self._requests = {name: Request(num_tokens) for name in names}
        waiting, begin, self.begun = deque(names), self._fast_now, None
        under_way: deque[tuple[Any, Directive]] = deque()
        while waiting or under_way or self._running:
            if waiting or self._running:
                under_way.append(self._schedule(waiting))
            if len(under_way) >= self.controller.limits.num_in_flight or not (waiting or self._running):
                self._run(*under_way.popleft())
            counts = [one.num_tokens - PROMPT_TOKENS for one in self._requests.values()] if self.begun is None else [0]
            if all(counts):
                self.begun = self._fast_now - begin, sum(counts)
        return self._fast_now - begin

    def serve(self, batch: int, num_tokens: int, num_steps: int) -> float:
        """Tokens/s while so many requests are there all the time, of that many tokens on average: whoever ends is
        followed by another. As they would without slow times."""
        self._requests, waiting = {}, deque[str]()
        under_way: deque[tuple[Any, Directive]] = deque()
        begin, num_before = self._fast_now, self.num_emitted
        for _ in range(num_steps):
            self._requests = {name: one for name, one in self._requests.items() if not one.is_done}
            while len(self._requests) < batch:
                name, self._count = f"r{self._count}", self._count + 1
                self._requests[name] = Request(1 + int(self._rng.exponential(num_tokens)))
                waiting.append(name)
            under_way.append(self._schedule(waiting))
            if len(under_way) >= self.controller.limits.num_in_flight:
                self._run(*under_way.popleft())
        while under_way:
            self._run(*under_way.popleft())
        self._finished |= self._requests.keys()
        return (self.num_emitted - num_before) / (self._fast_now - begin)

    @property
    def _running(self) -> list[str]:
        return [name for name, one in self._requests.items() if one.num_computed_tokens and not one.is_done]

    def _schedule(self, waiting: deque[str]) -> tuple[Any, Directive]:
        lengths = {name: self._lengths.get(name, 0) for name in self._running}
        scheduled = {name: 1 + length for name, length in lengths.items()}
        new = []
        while waiting and sum(scheduled.values()) + PROMPT_TOKENS <= BATCHED_TOKENS:
            name = waiting.popleft()
            scheduled[name] = PROMPT_TOKENS
            new.append(SimpleNamespace(req_id=name, num_computed_tokens=0))
        for name, number in scheduled.items():
            self._requests[name].num_computed_tokens += number
        output = SimpleNamespace(
            num_scheduled_tokens=scheduled,
            scheduled_spec_decode_tokens={name: [-1] * length for name, length in lengths.items() if length},
            total_num_scheduled_tokens=sum(scheduled.values()),
            scheduled_new_reqs=new,
            finished_req_ids=self._finished,
            requests={name: self._requests[name] for name in scheduled},
        )
        self._finished = set()
        directive = self.controller.decide(output, self._requests, len(waiting))
        self._lengths = directive.lengths
        return output, directive

    def _run(self, output: Any, directive: Directive) -> None:
        """The device gets to a step; then its report comes."""
        self._turn()
        verify_s, draft_s = self._noisy(self._verify_ms(output)), self._noisy(self._draft_ms(output, directive))
        is_drafting = draft_s > 0
        resume_s = self._noisy(self.costs.resume) if is_drafting and not self._was_drafting else 0.0
        self._was_drafting = is_drafting
        step_s = verify_s + draft_s + resume_s
        self.now += step_s
        self._fast_now += step_s / (self._slow_times if self._is_slow else 1.0)
        self.num_caught_up += directive.num_catch_up_tokens
        sampled = {}
        for name in output.num_scheduled_tokens:
            request, length = output.requests[name], len(output.scheduled_spec_decode_tokens.get(name, ()))
            stands = self._rng.random(length) < self.acceptance
            num_accepted = length if stands.all() else int(stands.argmin())
            sampled[name] = num_accepted + 1
            if request.is_done:
                continue  # it ended while this step was under way
            request.num_computed_tokens -= length - num_accepted
            request.all_token_ids += [0] * (num_accepted + 1)
            self.num_emitted += num_accepted + 1
            if request.is_done:
                self._finished.add(name)
        feedback = Feedback(verify_s, draft_s, verify_s + draft_s) if directive.is_timed else None
        self.controller.observe(directive.step, sampled, feedback)

    def _turn(self) -> None:
        """From a slow time to a fast one, or back."""
        if self._slow_times > 1 and self.now >= self._turns_at:
            self._is_slow = not self._is_slow
            self._turns_at = self.now + self._rng.exponential(SLOW_TIME_S)

    def _noisy(self, milliseconds: float) -> float:
        factor = self._slow_times if self._is_slow else 1.0
        return factor * milliseconds / 1e3 * (1 + self.noise * abs(self._rng.normal()))

    def _verify_ms(self, output: Any) -> float:
        costs, num_tokens = self.costs, output.total_num_scheduled_tokens
        if output.scheduled_new_reqs:
            return max(costs.prompt[0] + costs.prompt[1] * num_tokens, costs.ragged)
        num_seqs = len(output.num_scheduled_tokens)
        milliseconds = float(np.interp(num_tokens, *costs.verify) + np.interp(num_seqs, *costs.context))
        if num_tokens == num_seqs:
            size = size_of_batch(num_seqs)
            self._nums_plain[size] += 1
            milliseconds *= self._slow_start if self._nums_plain[size] <= NUM_SLOW else 1.0
            milliseconds *= self._slow_return if self._num_returned < NUM_SLOW else 1.0
        self._num_returned = self._num_returned + 1 if num_tokens == num_seqs else 0
        is_ragged = len(set(output.num_scheduled_tokens.values())) > 1
        return max(milliseconds, costs.ragged) if is_ragged else milliseconds

    def _draft_ms(self, output: Any, directive: Directive) -> float:
        costs, lengths = self.costs, list(directive.lengths.values())
        num_passes, num_late = max(lengths, default=0), directive.num_catch_up_tokens
        if not num_passes and not num_late:
            return 0.0
        num_prompt = PROMPT_TOKENS * len(output.scheduled_new_reqs)
        pass_ms = costs.draft[0] + costs.draft[1] * sum(length > 0 for length in lengths)
        # Pieces of few tokens take the host as long as the device takes for many.
        slow_ms = min(num_late / NUM_LATE, 1.0) * costs.resume
        late_ms = costs.catch_up[0] + costs.catch_up[1] * num_late + slow_ms if num_late else 0.0
        return costs.start + num_passes * pass_ms + costs.catch_up[1] * num_prompt + late_ms


def tokens_per_s(engine: VirtualVLLM, batch: int, num_rounds: int) -> float:
    """The mean of some rounds, from the first token of the last request on, after one that does not count."""
    engine.generate(batch, TOKENS[batch])
    found = []
    for _ in range(num_rounds):
        seconds = engine.generate(batch, TOKENS[batch])
        assert engine.begun is not None
        begun_s, num_before = engine.begun
        found.append((batch * TOKENS[batch] - num_before) / (seconds - begun_s))
    return statistics.mean(found)


def time_calls(controller: Controller) -> list[float]:
    """From now on, the seconds of all that the plugin does beside the scheduler."""
    spent: list[float] = []
    for name in ("decide", "observe", "forget"):
        function = getattr(controller, name)

        def timed(*args: Any, function: Any = function) -> Any:
            begin = time.perf_counter()
            try:
                return function(*args)
            finally:
                spent.append(time.perf_counter() - begin)

        setattr(controller, name, timed)
    return spent


def come_and_go(options: argparse.Namespace) -> None:
    policies = ("off", "static:1", "static:2", "static:3", "auto")
    print(f"{'batch':>5}" + "".join(f"{policy:>24}" for policy in policies))
    for batch in options.batches:
        cells, off = [], 0.0
        for policy in policies:
            engine = VirtualVLLM(policy, PAIRS[options.pair], options.acceptance, options.noise)
            engine.serve(batch, MEAN_TOKENS, NUM_STEPS)
            spent = time_calls(engine.controller)
            speed = engine.serve(batch, MEAN_TOKENS, 2 * NUM_STEPS)
            off = off or speed
            cells.append(f"{speed:.0f} {speed / off:.2f}x {1e6 * sum(spent) / (2 * NUM_STEPS):.0f} us")
        print(f"{batch:5}" + "".join(f"{cell:>24}" for cell in cells), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pair", choices=PAIRS, default="8b", help="whose costs")
    parser.add_argument("--acceptance", type=float, default=0.8)
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--noise", type=float, default=0.05, help="share that a step takes longer, typically")
    parser.add_argument("--batches", type=int, nargs="+", choices=TOKENS, default=list(TOKENS), help="in this order")
    parser.add_argument("--slow-start", type=float, default=1.0, help="times as long as others, the first steps")
    parser.add_argument("--slow-return", type=float, default=1.0, help="likewise the first without drafts behind some")
    parser.add_argument("--slow-times", type=float, default=1.0, help="likewise everything, half of the time")
    parser.add_argument("--come-and-go", action="store_true", help="whoever ends is followed by another")
    options = parser.parse_args()
    if options.come_and_go:
        come_and_go(options)
        return
    fixed = [f"static:{length}" for length in range(1, 5)]
    speeds: dict[str, list[dict[int, float]]] = {}
    for policy in ("off", *fixed, "auto"):
        engines = [
            VirtualVLLM(
                policy,
                PAIRS[options.pair],
                options.acceptance,
                options.noise,
                seed,
                slow_start=options.slow_start,
                slow_return=options.slow_return,
                slow_times=options.slow_times,
            )
            for seed in range(options.seeds)
        ]
        speeds[policy] = [
            {batch: tokens_per_s(one, batch, options.rounds) for batch in options.batches} for one in engines
        ]
    print(f"{'batch':>5}{'off':>9}{'best fixed length':>20}{'auto':>9}{'auto / off':>17}{'auto / best':>17}")
    for batch in options.batches:
        found = {policy: np.array([one[batch] for one in rows]) for policy, rows in speeds.items()}
        best = max(fixed, key=lambda policy: found[policy].mean())
        ratios = [found["auto"] / found[other] for other in ("off", best)]
        texts = "".join(f"{ratio.mean():9.3f} ± {half_width(ratio):.3f}" for ratio in ratios)
        print(
            f"{batch:5}{found['off'].mean():9.0f}{best:>11}{found[best].mean():9.0f}{found['auto'].mean():9.0f}{texts}"
        )


if __name__ == "__main__":
    main()
