"""`auto` on a machine beside fixed lengths, dsde and no speculation: live cells of batch size and acceptance.

    python benchmarks/auto_live.py --out auto_live.json --costs-out costs.json [--time-limit 280]
    python benchmarks/auto_live.py --shapes embedded --context-tokens 128 --turn-s 2 --learn-s 8   # on a CPU

Random weights in the shapes of an 8B target and a 1B draft, or the embedded pair; whether a drafted token stands is
tossed at its request's rate, so the draft's signals tell nothing and history alone decides. All policies, `off` too,
take turns on one engine, and the order is turned around in every round. Every turn begins with new requests that have
the same prompts, rates and slots, their prompts in the prefix cache, so that all have contexts alike; what a policy
knows of a slot it keeps, and it is told of as many tokens less that a request may have yet as it had in the turns
before, as if its requests had gone on. Likewise the draft lacks as many tokens as it did when the policy's last turn
ended: whoever did not draft pays for its own pause, up to the context, and for nobody else's.

Tokens a second are those to be expected of what was drafted, at the rates tossed with: luck is left out, since nothing
that a policy sees tells it beforehand which coin will fall well. `raw` are those that came. They are those of all
rounds together; ratios are taken within every round, and printed is their mean with its 95 % interval over rounds. The
first round is not counted: graphs are captured, and those that learn do. What passes take they know from the cell
before of that size, as far as a server keeps it in a file, and nothing else: a cell is a workload by itself (one after
another: `auto.py turn`).

Unlike an engine without a draft, `off` has a policy that the host tells of the batch now and then, and less KV memory,
which nobody here runs out of. Unlike an engine of their own, fixed lengths draft with the signals that others want. The
end of requests, and new ones, are not in it.

Everything measured so far is in `--out` after every cell. `--costs-out` is what passes took, by their sizes, for
`auto.py --costs`: medians over cells of fixed lengths. What catching up takes is measured by itself: tokens that the
draft had missed, and seconds beyond those of a draft that had missed none.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

from dsde import SamplingParams  # isort: skip  (before torch, as in cpu.py)
import numpy as np
import torch

from cores import keep_to_cores
from dsde.core.rng import derive_stream
from dsde.core.sequence import Sequence as TokenSequence
from dsde.drafting import ModelDrafter
from dsde.engine.config import EngineConfig
from dsde.engine.engine import Engine
from dsde.engine.rehearsal import rehearse
from dsde.models.batch import BLOCK_SIZE
from dsde.models.decoder import Decoder
from dsde.models.loader import load_draft, load_model
from dsde.policies import BatchView, Need, Outcome, Plan, Policy, make_policy
from dsde.policies.base import IntArray
from dsde.policies.static import Static
from dsde.sampling import Sampler
from dsde.verification.synthetic import kind_of
from gpu import SHAPES, counters, random_model
from intervals import half_width
from report import MAX_NUM_BATCHED_TOKENS, Report, Row, items, make_parser, parse, whole

LENGTHS = {1: (1, 2, 3, 4, 6, 8, 10), 64: (1, 2, 3, 4, 6), 256: (1, 2, 3)}
"""static ones by batch size; of another size: those of the largest that is not larger"""
LEAST_CHANCE = 0.05
"""that the last token of a static draft stands, of the cell's best requests; longer ones would only take time"""
EMBEDDED = "embedded"
"""instead of two shapes: the pair that comes with dsde"""
MAX_MODEL_LEN = 8192
ROOM = 512
"""tokens that a sequence of the largest batch has KV memory for beyond its prompt: twice what it writes in a turn, as
what was written before is what is forgotten first"""
NUM_SETTLING = 3
"""steps at the beginning of a turn that do not count: the first was under way already"""
LEAST_STEPS = 8
"""in a turn that counts"""
MISSED = (4, 16, 64, 256)
"""tokens a sequence, to measure catching up with"""
NUM_CATCH_UPS = 5
"""of each; those that meet a shape for the first two times tell nothing"""
LEAST_S = 1e-6


class Turns(Policy):
    """Policies that take turns on one engine. What a step found goes to the one that planned it."""

    def __init__(self) -> None:
        self.current: Policy = Static(0)
        self.rates = np.zeros(0)
        """[slots] of the requests there are"""
        self.num_got = np.zeros(0, np.int64)
        """[slots] tokens that these had before, as far as their policy knows"""
        self.expected = 0.0
        """tokens that drafts so far were to bring, with those that come anyway"""
        self.num_plain = 0
        """steps so far without a draft"""
        self.num_ruled = 0
        """steps so far whose draft a rule might have ended"""
        self._planned: deque[tuple[IntArray, Policy]] = deque()
        """who planned the steps under way; a plan is known by its batch, and may be that of several steps"""

    def begin(self, rates: np.ndarray, num_got: IntArray) -> None:
        """All requests are new, and nothing is under way. Nobody drafts until `current` is set."""
        # Not Off, which would have further steps queued when the next policy's turn comes.
        self.current, self.rates, self.num_got = Static(0), rates, num_got
        self._planned.clear()

    @property
    def needs(self) -> Need:  # type: ignore[override]
        """Also those of who planned a step that is still under way."""
        needs = self.current.needs
        for _, policy in self._planned:
            needs |= policy.needs
        return needs

    def plan(self, batch: BatchView) -> Plan:
        self._planned.append((batch.slots, self.current))
        return self.current.plan(self._gone_on(batch))

    def settle(self, coming: BatchView | None = None, is_pressed: bool = False) -> None:
        self.current.settle(None if coming is None else self._gone_on(coming), is_pressed)

    def _gone_on(self, batch: BatchView) -> BatchView:
        if batch.num_left is None:
            return batch
        return replace(batch, num_left=np.maximum(batch.num_left - self.num_got[batch.slots], 1))

    def rules_on(self) -> bool:
        return self.current.rules_on()

    def observe(self, outcome: Outcome) -> None:
        while self._planned[0][0] is not outcome.slots:
            self._planned.popleft()
        self._planned[0][1].observe(outcome)
        rates = self.rates[outcome.slots]
        self.expected += float((1 + rates * (1 - rates**outcome.drafted) / (1 - rates)).sum())
        self.num_plain += outcome.num_draft_passes == 0
        self.num_ruled += outcome.num_draft_passes > 0 and outcome.is_ruled

    def forget(self, slots: IntArray) -> None:
        """Their requests have ended, but the next ones are like them."""


class CatchUp(Policy):
    """Drafts one token a step and keeps what drafting took, and how much there was to read before it."""

    def __init__(self) -> None:
        self.found: list[tuple[int, float]] = []

    def plan(self, batch: BatchView) -> Plan:
        return Plan.wanting(1, batch)

    def observe(self, outcome: Outcome) -> None:
        if outcome.draft_s > 0:  # or a shape was met for the first times
            self.found.append((outcome.num_catch_up_tokens, outcome.draft_s))


class Window:
    """What an engine did since."""

    def __init__(self, engine: Engine, turns: Turns) -> None:
        self.engine, self.turns = engine, turns
        self.before, self.began = self._now(), time.perf_counter()

    def _now(self) -> Counter[str]:
        now = Counter(counters(self.engine.metrics))
        now["expected"] = self.turns.expected
        now["num_plain"], now["num_ruled"] = self.turns.num_plain, self.turns.num_ruled
        return now

    def done(self) -> Counter[str]:
        seconds, after = time.perf_counter() - self.began, self._now()
        after.subtract(self.before)
        after["seconds"] = seconds
        return after


def make_row(done: Counter[str]) -> Row:
    steps, passes, seconds = done["num_steps"], done["num_draft_passes"], done["seconds"]
    return {
        "tokens_per_s": done["expected"] / seconds,
        "raw_tokens_per_s": done["num_emitted_tokens"] / seconds,
        "steps": int(steps),
        "cold_steps": int(done["num_cold_steps"]),
        "plain_share": done["num_plain"] / steps,
        "ruled_share": done["num_ruled"] / steps,
        "step_ms": 1e3 * seconds / steps,
        "verify_ms": 1e3 * (done["target_s"] + done["accept_s"]) / steps,
        "draft_pass_ms": 1e3 * done["draft_s"] / passes if passes else None,
        "passes_per_step": passes / steps,
        "drafted_per_step": done["num_draft_tokens"] / steps,
        "catch_up_per_step": done["num_catch_up_tokens"] / steps,
        "policy_ms": 1e3 * done["plan_s"] / steps,
        "idle_ms": 1e3 * done["idle_s"] / steps,
    }


@dataclass(slots=True)
class Past:
    """Of the requests of a policy's last turn, where its next ones go on."""

    num_missed: IntArray
    """[slots] tokens that the draft has yet to read, the newest included"""
    num_got: IntArray
    """[slots] tokens that they had, in this turn and those before"""

    @classmethod
    def none(cls, batch: int, num_missed: int = 0) -> Past:
        return cls(np.full(batch, num_missed), np.zeros(batch, np.int64))


class Requests:
    """A batch that is there whenever a turn begins, always alike."""

    def __init__(self, engine: Engine, turns: Turns, kinds: Sequence[float], num_tokens: int) -> None:
        self.engine, self.turns, self.kinds = engine, turns, kinds
        rng = np.random.default_rng(0)
        # Whole blocks and one more: all that the prefix cache does not have is what a step reads anyway.
        size = engine.config.max_num_seqs, num_tokens // BLOCK_SIZE * BLOCK_SIZE + 1
        self._prompts = rng.integers(10, engine.intake.vocab_size, size).tolist()
        self._seeds = {rate: self._seeds_of(kind) for kind, rate in enumerate(kinds)}
        self.sequences: list[TokenSequence] = []

    def renew(self, batch: int, rates: Sequence[float], past: Past) -> None:
        """New requests, with these rates in turn, that go on where others ended."""
        self.end()
        self.turns.begin(np.resize(rates, batch), past.num_got)
        for number, prompt in enumerate(self._prompts[:batch]):
            seed = next(self._seeds[rates[number % len(rates)]])
            params = SamplingParams(temperature=0, max_tokens=MAX_MODEL_LEN, ignore_eos=True, seed=seed)
            request = self.engine.requests[self.engine.add(prompt, params)]
            self.sequences.append(request.completions[0].sequence)
        while not all(sequence.num_output_tokens for sequence in self.sequences):
            self.engine.step()
        assert [sequence.slot for sequence in self.sequences] == list(range(batch)), "slots are given out in order"
        for sequence, missed in zip(self.sequences, past.num_missed.tolist(), strict=True):
            sequence.num_draft_computed = min(sequence.num_draft_computed, max(sequence.num_tokens - missed, 0))

    def past(self) -> Past:
        missed = [max(s.num_tokens - s.num_draft_computed, 0) for s in self.sequences]
        return Past(np.array(missed), self.turns.num_got + [s.num_output_tokens for s in self.sequences])

    def step(self, seconds: float, least: int) -> None:
        end, done = time.perf_counter() + seconds, 0
        while done < least or time.perf_counter() < end:
            assert not self.engine.step().finished, "requests ended: turns are too long for the context"
            assert not self.engine.metrics.num_preemptions, "turns are too long for the KV memory"
            done += 1

    def end(self) -> None:
        for sequence in self.sequences:
            self.engine.abort(sequence.request_id)
        self.sequences.clear()
        self.engine.step()

    def _seeds_of(self, kind: int) -> Iterator[int]:
        return (seed for seed in count() if kind_of(derive_stream(seed, 0), len(self.kinds)) == kind)


class Bench:
    def __init__(self, options: argparse.Namespace, report: Report) -> None:
        self.options, self.report, self.began = options, report, time.perf_counter()
        kinds = sorted({rate for rates, _ in options.acceptance for rate in rates})
        self.turns = Turns()
        self.engine = self._make_engine(kinds)
        self.requests = Requests(self.engine, self.turns, kinds, options.context_tokens)
        self._learners: dict[tuple[str, int], Policy] = {}
        """of the last cell, by name and batch size"""
        self.cell_s: dict[int, float] = {}
        """that the last cell of a batch size took; before the first of them prompts are read"""
        print(f"models made in {self.seconds:.1f} s", flush=True)
        self._rehearse()

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.began

    def _rehearse(self) -> None:
        """As `dsde serve` does it, with the signals of whoever wants the most."""
        began = self.seconds
        self.turns.current = max(map(make_policy, self.options.policies), key=lambda policy: policy.needs.value)
        rehearse(self.engine)
        print(f"rehearsed in {self.seconds - began:.1f} s", flush=True)

    def _make_engine(self, kinds: Sequence[float]) -> Engine:
        options, device = self.options, torch.device(self.options.device)
        target, draft = make_pair(options.shapes, options.dtype, device)
        largest = max(options.batches)
        # A small batch writes much more in a turn.
        num_tokens = max(largest * (options.context_tokens + ROOM), 4 * MAX_MODEL_LEN)
        per_token = sum(model.config.kv_bytes_per_token(model.dtype) for model in (target, draft))
        config = EngineConfig(
            max_num_seqs=largest,
            max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
            max_model_len=MAX_MODEL_LEN,
            kv_cache_bytes=num_tokens * per_token,
            synthetic_acceptance=tuple((rate,) for rate in kinds),
        )
        sampler = Sampler()
        drafter = ModelDrafter(draft, sampler, target.config.vocab_size, config.tokens_per_pass(device))
        return Engine(target, drafter, self.turns, None, sampler, config)

    def run(self) -> None:
        """Rates by their order, and of each the batches by theirs: those named last are what time runs out for."""
        for rates, batches in self.options.acceptance:
            for batch in self.options.batches:
                if len(rates) > batch or batch not in (batches or self.options.batches):
                    continue
                if self.seconds + self.cell_s.get(batch, 0.0) > self.options.time_limit:
                    print("out of time", flush=True)
                    return
                began = self.seconds
                if batch not in self.cell_s:
                    self._measure_catching_up(batch, rates)
                    print(f"prompts read and caught up on in {self.seconds - began:.1f} s", flush=True)
                    began = self.seconds
                self._measure(batch, rates)
                self.cell_s[batch] = self.seconds - began

    def _measure_catching_up(self, batch: int, rates: Sequence[float]) -> None:
        """After it the prefix cache has the prompts, for the draft as well."""
        self.requests.renew(batch, rates, Past.none(batch))
        self.turns.current = Static(1)
        num_read = self.options.context_tokens // BLOCK_SIZE * BLOCK_SIZE
        while min(sequence.num_draft_computed for sequence in self.requests.sequences) < num_read:
            self.requests.step(0.0, 1)
        seconds = defaultdict(list)
        for missed in MISSED:
            if missed * batch > MAX_NUM_BATCHED_TOKENS or missed > num_read:
                continue
            for _ in range(NUM_CATCH_UPS):
                policy = CatchUp()
                self.requests.renew(batch, rates, Past.none(batch, missed))
                self.turns.current = policy
                self.requests.step(0.0, 2 * NUM_SETTLING)
                ordinary = [draft_s for tokens, draft_s in policy.found if tokens <= batch]
                for tokens, draft_s in policy.found:
                    if tokens > batch and ordinary:
                        seconds[tokens].append(draft_s - statistics.median(ordinary))
        for tokens, values in sorted(seconds.items()):
            # Few tokens may take no longer than the noise, which can be on either side.
            typical = max(statistics.median(values), LEAST_S)
            self.report["catch_up"].append({"batch": batch, "tokens": tokens, "seconds": typical, "rounds": values})

    def _measure(self, batch: int, rates: Sequence[float]) -> None:
        fixed = ["off", *(f"static:{length}" for length in self._lengths(batch, rates))]
        specs = [*fixed, *self.options.policies]
        policies = {spec: make_policy(spec) for spec in fixed}
        for spec in self.options.policies:
            policies[spec] = make_policy(spec)
            before = self._learners.get((spec, batch), policies[spec])
            for model, known in zip(policies[spec].cost_models, before.cost_models, strict=True):
                if known.num_measured:
                    model.restore(known.to_dict())
            self._learners[spec, batch] = policies[spec]
        pasts = {spec: Past.none(batch) for spec in specs}
        found: dict[str, list[Counter[str]]] = defaultdict(list)
        for number in range(self.options.rounds + 1):
            if torch.cuda.is_available():
                keep_to_cores()
            # Those who want signals come first of all: whatever is captured after them is captured with signals.
            for spec in specs if number % 2 else specs[::-1]:
                for seconds in self._turns_s(spec in fixed, number):
                    self.requests.renew(batch, rates, pasts[spec])
                    self.turns.current = policies[spec]
                    self.requests.step(0.0, NUM_SETTLING)
                    window = Window(self.engine, self.turns)
                    self.requests.step(seconds, LEAST_STEPS)
                    if number:
                        found[spec].append(window.done())
                    pasts[spec] = self.requests.past()
        self.requests.end()
        self._save(batch, rates, found)

    def _lengths(self, batch: int, rates: Sequence[float]) -> list[int]:
        """At least one."""
        lengths = LENGTHS[max(size for size in LENGTHS if size <= batch)]
        return [length for length in lengths if length == lengths[0] or max(rates) ** length >= LEAST_CHANCE]

    def _turns_s(self, is_fixed: bool, number: int) -> list[float]:
        """Of a round. All of them last as long, since contexts grow meanwhile, and everything takes longer."""
        turn_s = float(self.options.turn_s)
        if is_fixed:
            return [turn_s if number else 0.0]
        return [turn_s] * (1 if number else max(round(self.options.learn_s / max(turn_s, LEAST_S)), 1))

    def _save(self, batch: int, rates: Sequence[float], found: dict[str, list[Counter[str]]]) -> None:
        speeds = {spec: [done["expected"] / done["seconds"] for done in rounds] for spec, rounds in found.items()}
        best = max((spec for spec in speeds if spec.startswith("static:")), key=lambda spec: sum(speeds[spec]))
        for spec, rounds in found.items():
            row = {"batch": batch, "acceptance": "/".join(map(str, rates)), "policy": spec}
            row |= make_row(sum(rounds, Counter()))
            row["rounds"], row["best_static"] = speeds[spec], best
            for name, other in (("vs_off", "off"), ("vs_static", best)):
                row |= _ratios(name, speeds[spec], speeds[other])
            self.report["cells"].append(row)
            print(_line(row), flush=True)
        self.report["seconds"] = self.seconds
        self.report.save()
        if self.options.costs_out:
            table = costs(self.report["cells"], self.report["catch_up"], self.report["machine"])
            self.options.costs_out.write_text(json.dumps(table, indent=1), encoding="utf-8")


def _ratios(name: str, speeds: list[float], others: list[float]) -> Row:
    """Round by round: all of them, their mean with half the width of its interval, and their median."""
    ratios = [speed / other for speed, other in zip(speeds, others, strict=True)]
    return {
        name: statistics.mean(ratios),
        f"{name}_error": half_width(ratios) if len(ratios) > 1 else None,
        f"{name}_median": statistics.median(ratios),
        f"{name}_rounds": ratios,
    }


def make_pair(shapes: Sequence[str], dtype: torch.dtype, device: torch.device) -> list[Decoder]:
    if shapes == [EMBEDDED]:
        target = load_model(None, dtype, device)
        return [target.model, load_draft(EMBEDDED, target).model]
    return [random_model(SHAPES[name], dtype, device, number) for number, name in enumerate(shapes)]


HEADER = (
    f"{'batch':>5} {'acceptance':10} {'policy':10}{'tokens/s':>9}{'vs off':>16}{'vs best static':>16}"
    f"{'step ms':>8}{'verify':>8}{'a pass':>8}{'passes':>7}{'length':>7}{'plain':>7}{'ruled':>7}"
    f"{'catch-up':>9}{'policy':>8}{'idle':>7}{'cold':>5}"
)


def _line(row: Row) -> str:
    """Lengths and tokens caught up on are those of a sequence and a step."""
    ratios = "".join(f"{row[name]:8.3f} ±{_number(row[f'{name}_error']):6.3f}" for name in ("vs_off", "vs_static"))
    times = f"{row['step_ms']:8.3f}{row['verify_ms']:8.3f}{_number(row['draft_pass_ms']):8.3f}"
    sizes = f"{row['passes_per_step']:7.2f}{row['drafted_per_step'] / row['batch']:7.2f}{row['plain_share']:7.1%}"
    sizes += f"{row['ruled_share']:7.1%}"
    host = f"{row['catch_up_per_step'] / row['batch']:9.2f}{row['policy_ms']:8.3f}{row['idle_ms']:7.3f}"
    names = f"{row['batch']:5} {row['acceptance']:10} {row['policy']:10}"
    return f"{names}{row['tokens_per_s']:9.1f}{ratios}{times}{sizes}{host}{row['cold_steps']:5}"


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def costs(cells: list[Row], catch_up: list[Row], machine: str) -> dict[str, object]:
    """Medians over the cells whose sizes are known: no speculation, and fixed lengths."""
    draft, verify, plain, drafting = defaultdict(list), defaultdict(list), [], []
    for row in cells:
        is_off, size = row["policy"] == "off", row["batch"]
        if not is_off and not row["policy"].startswith("static:"):
            continue
        verify[size, size + round(row["drafted_per_step"])].append(row["verify_ms"] / 1e3)
        rest_ms = row["step_ms"] - row["verify_ms"] - row["passes_per_step"] * (row["draft_pass_ms"] or 0.0)
        (plain if is_off else drafting).append(max(rest_ms, 0.0) / 1e3)
        if not is_off:
            draft[size].append(row["draft_pass_ms"] / 1e3)
    caught_up = defaultdict(list)
    for row in catch_up:
        caught_up[row["tokens"]].append(row["seconds"])
    step_s = statistics.median(plain)
    return {
        "machine": machine,
        "draft": [[size, statistics.median(values)] for size, values in sorted(draft.items())],
        "verify": [[*sizes, statistics.median(values)] for sizes, values in sorted(verify.items())],
        "catch_up": [[size, statistics.median(values)] for size, values in sorted(caught_up.items())],
        "step_s": step_s,
        "drafting_s": max(statistics.median(drafting) - step_s, 0.0),
    }


def rates_of_cells(text: str) -> list[tuple[tuple[float, ...], list[int]]]:
    """Rates, and the batches that are measured with them; none: all."""
    parts = [part.partition("@") for part in text.split(";")]
    return [(tuple(map(float, items(rates))), whole(batches) if batches else []) for rates, _, batches in parts]


def parse_options() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--costs-out", type=Path, help="JSON, rewritten after every cell")
    parser.add_argument("--shapes", type=items, default="8b,1b", help=f"two of {', '.join(SHAPES)}; or {EMBEDDED}")
    # The largest first: graphs are captured anew whenever a batch needs more room than any before it.
    parser.add_argument("--batches", type=whole, default="256,64,8,1", help="in this order, for each of the rates")
    parser.add_argument(
        "--acceptance",
        type=rates_of_cells,
        default="0.8;0.95,0.4;0.3;0.95;0.6",
        help="of a cell's requests, the most important first; several separated by commas: in turn; 0.8@64,8: only "
        "with these batches",
    )
    parser.add_argument("--policies", type=items, default="dsde,auto", help="beside off and the static lengths")
    parser.add_argument("--rounds", type=int, default=4, help="that count")
    parser.add_argument("--turn-s", type=float, default=0.25, help="of every policy in every round")
    parser.add_argument("--learn-s", type=float, default=1.0, help="turns of others that do not count")
    parser.add_argument("--context-tokens", type=int, default=512, help="that every turn begins with")
    options = parse(parser)
    unknown = {batch for _, batches in options.acceptance for batch in batches} - set(options.batches)
    if unknown:
        parser.error(f"--acceptance names batches that --batches does not: {', '.join(map(str, sorted(unknown)))}")
    return options


def main() -> None:
    options = parse_options()
    bench = Bench(options, Report(options, cells=[], catch_up=[]))
    print(HEADER, flush=True)
    bench.run()


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
