"""`auto` on a GPU beside fixed lengths, dsde and no speculation: live cells of batch size and acceptance.

    python benchmarks/auto_gpu.py --out auto_gpu.json --costs-out costs.json [--time-limit 280]

Random weights in the shapes of an 8B target and a 1B draft; whether a drafted token stands is tossed at its request's
rate, so the draft's signals tell nothing and history alone decides. All policies serve the same requests in turn, a
moment each, and the order is turned around in every round: nobody has the shorter contexts, and no batch has an end.
Tokens a second are those to be expected of what was drafted, at the rates tossed with: luck is left out, since nothing
that a policy sees tells it beforehand which coin will fall well. `raw` are those that came.
The first round is not counted: graphs are captured, and those that learn do. `off` has an engine without a draft.

Everything measured so far is in `--out` after every cell. `--costs-out` is what passes took, by their sizes, for
`auto.py --costs`.
"""

from __future__ import annotations

import json
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Iterator
from itertools import count
from pathlib import Path

from dsde import SamplingParams  # isort: skip  (before torch, as in cpu.py)
import numpy as np
import torch

from dsde.core.rng import derive_stream
from dsde.drafting import ModelDrafter
from dsde.engine.config import EngineConfig
from dsde.engine.engine import Engine
from dsde.models.batch import BLOCK_SIZE
from dsde.models.decoder import Decoder
from dsde.policies import BatchView, Need, Off, Outcome, Plan, Policy, make_policy
from dsde.policies.base import IntArray
from dsde.sampling import Sampler
from dsde.verification.synthetic import kind_of
from gpu import SHAPES, counters, random_model
from report import MAX_NUM_BATCHED_TOKENS, Report, Row, items, make_parser, parse, whole
from vllm_run import PROMPT_TOKENS, random_prompts

LENGTHS = {1: (1, 3, 5, 8), 8: (1, 2, 4, 6), 64: (1, 2, 3, 5), 256: (1, 2, 3)}
"""static ones by batch size; of another size: those of the largest that is not larger"""
MAX_MODEL_LEN = 8192
NUM_CATCHING_UP = 6
"""steps at the beginning of a turn that do not count: the draft has yet to read what others wrote"""
OFF_CONTEXT = 512
"""tokens of a sequence that the engine without a draft has KV memory for, at the largest batch"""
LEAST_STEPS = 12
"""in a turn that counts"""


class Turns(Policy):
    """Policies that take turns on one engine. What a step found goes to the one that planned it."""

    def __init__(self) -> None:
        self.current: Policy = Off()
        self.rates = np.zeros(0)
        """[slots] of the requests there are"""
        self.expected = 0.0
        """tokens that drafts so far were to bring, with those that come anyway"""
        self._planned: deque[tuple[IntArray, Policy]] = deque()
        """who planned the steps under way; a plan is known by its batch, and may be that of several steps"""

    @property
    def needs(self) -> Need:  # type: ignore[override]
        """Also those of who planned a step that is still under way."""
        needs = self.current.needs
        for _, policy in self._planned:
            needs |= policy.needs
        return needs

    def plan(self, batch: BatchView) -> Plan:
        self._planned.append((batch.slots, self.current))
        return self.current.plan(batch)

    def settle(self) -> None:
        self.current.settle()

    def observe(self, outcome: Outcome) -> None:
        while self._planned[0][0] is not outcome.slots:
            self._planned.popleft()
        self._planned[0][1].observe(outcome)
        rates = self.rates[outcome.slots]
        self.expected += float((1 + rates * (1 - rates**outcome.drafted) / (1 - rates)).sum())

    def forget(self, slots: IntArray) -> None:
        """Nobody ends before a cell does, and with it all policies."""


class Window:
    """What an engine did since."""

    def __init__(self, engine: Engine, turns: Turns | None) -> None:
        self.engine, self.turns = engine, turns
        self.expected = turns.expected if turns else 0.0
        self.before, self.began = counters(engine.metrics), time.perf_counter()

    def row(self) -> Row:
        seconds, after = time.perf_counter() - self.began, counters(self.engine.metrics)
        done = {name: value - self.before[name] for name, value in after.items()}
        steps, passes = done["num_steps"], done["num_draft_passes"]
        emitted = done["num_emitted_tokens"]
        return {
            "tokens_per_s": (self.turns.expected - self.expected if self.turns else emitted) / seconds,
            "raw_tokens_per_s": emitted / seconds,
            "steps": int(steps),
            "step_ms": 1e3 * seconds / steps,
            "verify_ms": 1e3 * (done["target_s"] + done["accept_s"]) / steps,
            "draft_pass_ms": 1e3 * done["draft_s"] / passes if passes else None,
            "passes_per_step": passes / steps,
            "drafted_per_step": done["num_draft_tokens"] / steps,
            "policy_ms": 1e3 * done["plan_s"] / steps,
            "idle_ms": 1e3 * done["idle_s"] / steps,
        }


class Bench:
    def __init__(self, options: object, report: Report) -> None:
        self.options, self.report, self.began = options, report, time.perf_counter()
        self.kinds = sorted({rate for rates in options.acceptance for rate in rates})
        device = torch.device(options.device)
        self.target, self.draft = (
            random_model(SHAPES[name], options.dtype, device, number) for number, name in enumerate(options.shapes)
        )
        self.turns = Turns()
        self.engines: dict[bool, Engine] = {}
        print(f"models made in {time.perf_counter() - self.began:.1f} s", flush=True)

    @property
    def is_late(self) -> bool:
        return time.perf_counter() - self.began > self.options.time_limit

    def engine(self, drafts: bool) -> Engine:
        if drafts not in self.engines:
            sampler, models = Sampler(), [self.target, *([self.draft] if drafts else [])]
            config = EngineConfig(
                max_num_seqs=max(self.options.batches),
                max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
                max_model_len=MAX_MODEL_LEN,
                kv_cache_bytes=self._kv_bytes(models),
                synthetic_acceptance=tuple((rate,) for rate in self.kinds),
            )
            drafter = None
            if drafts:
                num_tokens = config.tokens_per_pass(self.target.device)
                drafter = ModelDrafter(self.draft, sampler, self.target.config.vocab_size, num_tokens)
            policy = self.turns if drafts else Off()
            self.engines[drafts] = Engine(self.target, drafter, policy, None, sampler, config)
        return self.engines[drafts]

    def _kv_bytes(self, models: list[Decoder]) -> int:
        per_token = sum(model.config.kv_bytes_per_token(model.dtype) for model in models)
        # Without a draft an engine serves one policy for a few moments, with one all of them.
        context = min(MAX_MODEL_LEN, self.options.context_tokens) if len(models) > 1 else OFF_CONTEXT
        wanted = max(batch * context for batch in self.options.batches)
        return (max(wanted, MAX_MODEL_LEN) + 16 * BLOCK_SIZE * max(self.options.batches)) * per_token

    def run(self) -> None:
        for batch in self.options.batches:
            off = self._measure_off(batch)
            for rates in self.options.acceptance:
                if self.is_late:
                    print("out of time", flush=True)
                    return
                if len(rates) <= batch:
                    self._measure(batch, rates, off)

    def _measure_off(self, batch: int) -> Row:
        engine = self.engine(drafts=False)
        names = self._add(engine, batch, self.kinds[:1])
        self._step(engine, self.options.turn_s, LEAST_STEPS)
        rows = []
        for _ in range(self.options.rounds):
            window = Window(engine, None)
            self._step(engine, self.options.turn_s, LEAST_STEPS)
            rows.append(window.row())
        self._end(engine, names)
        row = _median(rows) | {"batch": batch, "acceptance": "any", "policy": "off"}
        self._save(row, row, None)
        return row

    def _measure(self, batch: int, rates: tuple[float, ...], off: Row) -> None:
        lengths = LENGTHS[max(size for size in LENGTHS if size <= batch)]
        specs = [*(f"static:{length}" for length in lengths), *self.options.policies]
        policies = {spec: make_policy(spec) for spec in specs}
        engine = self.engine(drafts=True)
        names = self._add(engine, batch, list(rates))
        self.turns.rates = self._rates_by_slot(engine, names, rates)
        found: dict[str, list[Row]] = defaultdict(list)
        for number in range(self.options.rounds + 1):
            for spec in specs if number % 2 == 0 else specs[::-1]:
                self.turns.current = policies[spec]
                learns = number == 0 and not spec.startswith("static")
                self._step(engine, (self.options.learn_s if learns else 0.0), NUM_CATCHING_UP)
                window = Window(engine, self.turns)
                self._step(engine, 0.0 if number == 0 else self.options.turn_s, LEAST_STEPS)
                if number:
                    found[spec].append(window.row())
        self._end(engine, names)
        rows = {}
        for spec in specs:
            acceptance = "/".join(map(str, rates))
            rows[spec] = _median(found[spec]) | {"batch": batch, "acceptance": acceptance, "policy": spec}
        best = max(
            (row for spec, row in rows.items() if spec.startswith("static")), key=lambda row: row["tokens_per_s"]
        )
        for row in rows.values():
            self._save(row, off, best)

    def _add(self, engine: Engine, batch: int, rates: list[float]) -> list[str]:
        """Requests that have these rates, in turn, and are through with their prompts."""
        prompts = random_prompts(batch, batch, engine.intake.vocab_size)
        seeds = {rate: self._seeds(self.kinds.index(rate)) for rate in set(rates)}
        names = []
        for number, prompt in enumerate(prompts):
            seed = next(seeds[rates[number % len(rates)]])
            params = SamplingParams(temperature=0, max_tokens=MAX_MODEL_LEN, ignore_eos=True, seed=seed)
            names.append(engine.add(prompt, params))
        while engine.scheduler.waiting:
            engine.step()
        return names

    def _rates_by_slot(self, engine: Engine, names: list[str], rates: tuple[float, ...]) -> np.ndarray:
        slots = [engine.requests[name].completions[0].sequence.slot for name in names]
        by_slot = np.zeros(max(slots) + 1)
        by_slot[slots] = np.resize(rates, len(names))
        return by_slot

    def _seeds(self, kind: int) -> Iterator[int]:
        return (seed for seed in count() if kind_of(derive_stream(seed, 0), len(self.kinds)) == kind)

    def _step(self, engine: Engine, seconds: float, least: int) -> None:
        end, done = time.perf_counter() + seconds, 0
        while done < least or time.perf_counter() < end:
            assert not engine.step().finished, "requests ended: --turn-s is too long for the context"
            done += 1

    def _end(self, engine: Engine, names: list[str]) -> None:
        self.turns.current = Off()
        for name in names:
            engine.abort(name)
        engine.step()

    def _save(self, row: Row, off: Row, best: Row | None) -> None:
        row["vs_off"] = row["tokens_per_s"] / off["tokens_per_s"]
        row["vs_static"] = row["tokens_per_s"] / best["tokens_per_s"] if best else None
        self.report["cells"].append(row)
        self.report["seconds"] = time.perf_counter() - self.began
        self.report.save()
        if self.options.costs_out:
            text = json.dumps(costs(self.report["cells"], self.report["machine"]), indent=1)
            self.options.costs_out.write_text(text, encoding="utf-8")
        to_best = "" if best is None else f"{row['vs_static']:9.3f}"
        numbers = f"{row['tokens_per_s']:10.1f}{row['raw_tokens_per_s']:10.1f}"
        numbers += f"{row['vs_off']:9.3f}{to_best:>9}{row['spread']:8.1%}"
        numbers += f"{row['step_ms']:9.3f}{row['verify_ms']:9.3f}{row['draft_pass_ms'] or 0:9.3f}"
        numbers += f"{row['passes_per_step']:8.2f}{row['drafted_per_step'] / row['batch']:8.2f}{row['policy_ms']:9.3f}"
        print(f"{row['batch']:5} {row['acceptance']:10} {row['policy']:12}{numbers}", flush=True)


HEADER = (
    f"{'batch':>5} {'acceptance':10} {'policy':12}{'tokens/s':>10}{'raw':>10}{'vs off':>9}{'vs best':>9}{'spread':>8}"
    f"{'step ms':>9}{'verify':>9}{'a pass':>9}{'passes':>8}{'length':>8}{'policy':>9}"
)


def _median(rows: list[Row]) -> Row:
    speeds = [row["tokens_per_s"] for row in rows]
    middle = sorted(rows, key=lambda row: row["tokens_per_s"])[len(rows) // 2]
    return {**middle, "tokens_per_s": statistics.median(speeds), "spread": (max(speeds) - min(speeds)) / max(speeds)}


def costs(cells: list[Row], machine: str) -> dict[str, object]:
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
    step_s = statistics.median(plain)
    return {
        "machine": machine,
        "draft": [[size, statistics.median(values)] for size, values in sorted(draft.items())],
        "verify": [[*sizes, statistics.median(values)] for sizes, values in sorted(verify.items())],
        "step_s": step_s,
        "drafting_s": max(statistics.median(drafting) - step_s, 0.0) if drafting else 0.0,
    }


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--costs-out", type=Path, help="JSON, rewritten after every cell")
    parser.add_argument("--shapes", type=items, default="8b,1b", help=f"two of {', '.join(SHAPES)}")
    parser.add_argument("--batches", type=whole, default="1,8,64,256")
    parser.add_argument(
        "--acceptance",
        type=lambda text: [tuple(float(rate) for rate in part.split(",")) for part in text.split(";")],
        default="0.3;0.8;0.95;0.95,0.4",
        help="of a cell's requests; several separated by commas: in turn",
    )
    parser.add_argument("--policies", type=items, default="dsde,auto", help="beside the static lengths")
    parser.add_argument("--rounds", type=int, default=3, help="that count; the median does")
    parser.add_argument("--turn-s", type=float, default=0.25)
    parser.add_argument("--learn-s", type=float, default=1.0, help="first turn of a policy that is not static")
    parser.add_argument("--context-tokens", type=int, default=1536, help="that there is KV memory for, per sequence")
    options = parse(parser)
    print(f"prompts of {PROMPT_TOKENS} tokens", flush=True)
    report = Report(options, cells=[])
    bench = Bench(options, report)
    print(HEADER, flush=True)
    bench.run()


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
