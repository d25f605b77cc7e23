"""Decoding speed on a GPU: against the memory's speed, against vLLM, and of every part of a step.

    python benchmarks/gpu.py --out gpu.json [--vllm SITE] [--first-token]

The weights are random, in the shapes of an 8B target and a 1B draft, and a drafted token is accepted with a given
probability (0.8) if those before it were. Decoding speed is the difference between a long and a short generation from
128-token prompts, so that prefill cancels; a long one that nobody measures comes first. How many tokens are generated
follows from the variance of what a step emits: the standard error of every figure, as far as acceptance is random, is
below `--error`, and the unluckiest sequence of a batch is expected to take at most `--tail` longer than the mean one.
With vLLM importable (or its site folder given), vLLM then does the same with the same shapes, prompts, counts and
acceptance. Real models: `pair.py`.

Everything measured so far is in `--out` after every measurement: an interrupted run loses nothing.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from dsde import SamplingParams  # isort: skip  (before torch, as in cpu.py)
import numpy as np
import torch

import vllm_run
from dsde.drafting import ModelDrafter
from dsde.engine.config import EngineConfig
from dsde.engine.engine import Engine
from dsde.engine.metrics import EngineMetrics
from dsde.models.batch import BLOCK_SIZE
from dsde.models.config import ModelConfig
from dsde.models.decoder import Decoder
from dsde.models.weights import build_model
from dsde.policies import make_policy
from dsde.sampling import Sampler
from report import MAX_NUM_BATCHED_TOKENS, Report, Row, items, make_parser, parse, policy_names, speed_ratio, whole
from vllm_run import PROMPT_TOKENS, RESULT, SHORT_TOKENS, Job, prompt_seed, random_prompts

CELLS = "1=0,2,3,4,5,6;8=0,2,3,4,5;64=0,1,2,3,dsde;256=0,1"
MAX_MODEL_LEN = 2048
NOMINAL_LENGTH = 4
"""of a policy whose lengths vary"""


class Shape(NamedTuple):
    hidden: int
    layers: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int

    def hf_config(self) -> dict[str, Any]:
        """What `config.json` of such a model says; both engines read this."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "intermediate_size": self.ffn,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab,
            "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "torch_dtype": "bfloat16",
            "bos_token_id": 1,
            "eos_token_id": 2,
            "tie_word_embeddings": False,
            "hidden_act": "silu",
        }

    def layer_weights(self) -> dict[str, tuple[int, int]]:
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "self_attn.q_proj": (queries, self.hidden),
            "self_attn.k_proj": (keys, self.hidden),
            "self_attn.v_proj": (keys, self.hidden),
            "self_attn.o_proj": (self.hidden, queries),
            "mlp.gate_proj": (self.ffn, self.hidden),
            "mlp.up_proj": (self.ffn, self.hidden),
            "mlp.down_proj": (self.hidden, self.ffn),
        }

    def num_read_weights(self) -> int:
        """Weights that every pass reads: all but the embedding, of which it needs a few rows."""
        per_layer = sum(rows * columns for rows, columns in self.layer_weights().values())
        return self.layers * per_layer + self.vocab * self.hidden


SHAPES = {
    "8b": Shape(4096, 32, 14336, 32, 8, 128, 128256),
    "1b": Shape(2048, 16, 8192, 32, 8, 64, 128256),
    "1.5b": Shape(1536, 28, 8960, 12, 2, 128, 151936),
    "0.5b": Shape(896, 24, 4864, 14, 2, 64, 151936),
    "tiny": Shape(64, 2, 128, 4, 2, 16, 512),
}


# How much to generate


def emitted_moments(rates: Sequence[float], length: int) -> tuple[float, float]:
    """Mean and variance of the tokens that one step of one sequence emits."""
    survival = np.cumprod([1.0, *rates[:length]])
    mean = float(survival.sum())
    return mean, float(((2 * np.arange(len(survival)) + 1) * survival).sum()) - mean**2


def steps_spread(rates: Sequence[float], length: int, tokens: int) -> float:
    """Standard deviation of the steps that a sequence needs for `tokens`, relative to their mean."""
    mean, variance = emitted_moments(rates, length)
    # They are those of a renewal process: tokens / mean, with variance tokens * variance / mean^3.
    return math.sqrt(variance / (mean * tokens))


@lru_cache
def slowest(batch: int, rounds: int) -> tuple[float, float]:
    """Of the largest of `batch` standard normals: its mean, and the standard deviation of its median over rounds.

    A batch has finished when its unluckiest sequence has.
    """
    largest = np.random.default_rng(0).standard_normal((4000, rounds, batch)).max(axis=2)
    # One sequence alone is the mean; the draws only come near it.
    return float(largest.mean()) if batch > 1 else 0.0, float(np.median(largest, axis=1).std())


def tokens_needed(rates: Sequence[float], length: int, batch: int, rounds: int, error: float, tail: float) -> int:
    """Tokens a sequence must generate in every round.

    So many that the error of a speed stays below `error`, and that a batch, which shrinks while its slowest sequences
    catch up, is not mostly this: the slowest is expected to need at most the share `tail` more steps than the mean.
    """
    excess, deviation = slowest(batch, rounds)
    for_both = (max(excess / tail, deviation / error) * steps_spread(rates, length, 1)) ** 2
    # Enough steps for a steady mean even where nothing is random.
    least = 256 if batch < 64 else 96
    return 16 * math.ceil(max(for_both, least) / 16)


class Cell(NamedTuple):
    batch: int
    policy: str
    tokens: int
    """that each sequence generates in the long run beyond the short one"""


def static_length(policy: str) -> int | None:
    """None: it varies."""
    if policy == "off":
        return 0
    name, _, length = policy.partition(":")
    return int(length) if name == "static" and length.isdigit() else None


def nominal_length(policy: str) -> int:
    """What the noise of a policy is worked out for."""
    length = static_length(policy)
    return NOMINAL_LENGTH if length is None else length


def policies_of(batch: int, by_batch: str) -> list[str]:
    """Of an unknown batch: those of the largest known one that is not larger."""
    plan = {int(key): value for key, _, value in (part.partition("=") for part in by_batch.split(";"))}
    known = max((key for key in plan if key <= batch), default=min(plan))
    return policy_names(plan[known])


def plan_cells(options: argparse.Namespace) -> list[Cell]:
    cells = []
    for batch in options.batches:
        for policy in options.policies or policies_of(batch, options.lengths_by_batch):
            length = nominal_length(policy)
            tokens = tokens_needed(options.acceptance, length, batch, options.rounds, options.error, options.tail)
            cells.append(Cell(batch, policy, min(tokens, MAX_MODEL_LEN - PROMPT_TOKENS - 2 * SHORT_TOKENS)))
    return cells


# Our side


def random_model(shape: Shape, dtype: torch.dtype, device: torch.device, seed: int) -> Decoder:
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*size: int) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=device).normal_(0, 0.02, generator=generator)

    ones = torch.ones(shape.hidden, dtype=dtype, device=device)
    tensors = {
        "model.embed_tokens.weight": normal(shape.vocab, shape.hidden),
        "model.norm.weight": ones,
        "lm_head.weight": normal(shape.vocab, shape.hidden),
    }
    for i in range(shape.layers):
        for name, size in shape.layer_weights().items():
            tensors[f"model.layers.{i}.{name}.weight"] = normal(*size)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{i}.{name}.weight"] = ones.clone()
    return build_model(ModelConfig.from_hf(shape.hf_config()), tensors, dtype, device)


def make_engine(target: Decoder, draft: Decoder, policy: str, rates: Sequence[float], cells: Sequence[Cell]) -> Engine:
    """An engine with KV memory for the largest of these cells. `off` has no draft at all."""
    per_token = target.config.kv_bytes_per_token(target.dtype) + draft.config.kv_bytes_per_token(draft.dtype)
    # Beyond its tokens a sequence needs look-ahead, and blocks in reserve to be admitted.
    num_blocks = max(c.batch * (math.ceil((PROMPT_TOKENS + c.tokens + SHORT_TOKENS) / BLOCK_SIZE) + 3) for c in cells)
    config = EngineConfig(
        max_num_seqs=max(cell.batch for cell in cells),
        max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
        max_model_len=MAX_MODEL_LEN,
        kv_cache_bytes=num_blocks * BLOCK_SIZE * per_token,
        synthetic_acceptance=tuple(rates),
    )
    return assemble(target, draft, policy, config)


def assemble(target: Decoder, draft: Decoder, policy: str, config: EngineConfig) -> Engine:
    sampler = Sampler()
    drafter = None
    if policy != "off":
        drafter = ModelDrafter(draft, sampler, target.config.vocab_size, config.tokens_per_pass(target.device))
    return Engine(target, drafter, make_policy(policy), None, sampler, config)


def counters(metrics: EngineMetrics) -> dict[str, float]:
    values = {field.name: getattr(metrics, field.name) for field in fields(metrics)}
    return {name: float(value) for name, value in values.items() if isinstance(value, int | float)}


@dataclass
class Generation:
    """What one generation took."""

    seconds: float
    counts: dict[str, float]
    """of the engine's metrics, what this generation added"""
    num_draft_passes: int
    """passes of the draft: in every step as many as its longest draft has tokens"""
    full_batch_rate: float | None
    """tokens a second while nobody had finished yet"""

    def beyond(self, short: Generation) -> Generation:
        """What was left to do where `short` ended: decoding alone, as both read prompts of the same length."""
        counts = {name: value - short.counts[name] for name, value in self.counts.items()}
        num_draft_passes = self.num_draft_passes - short.num_draft_passes
        return Generation(self.seconds - short.seconds, counts, num_draft_passes, self.full_batch_rate)


def generate(engine: Engine, batch: int, tokens: int, round_number: int) -> Generation:
    vocab_size = engine.intake.vocab_size
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    for prompt in random_prompts(prompt_seed(batch, round_number, tokens), batch, vocab_size):
        engine.add(prompt, params)
    metrics, before = engine.metrics, counters(engine.metrics)
    settled = before["num_emitted_tokens"] + SHORT_TOKENS * batch
    depths, num_draft_passes = list(metrics.num_draft_tokens_per_pos), 0
    full_from: tuple[float, int] | None = None
    full_batch_rate: float | None = None
    start = time.perf_counter()
    while engine.has_work:
        finished = engine.step().finished
        if full_batch_rate is None:
            now, emitted = time.perf_counter(), metrics.num_emitted_tokens
            if full_from is None:
                full_from = (now, emitted) if emitted >= settled else None
            elif finished:
                full_batch_rate = (emitted - full_from[1]) / (now - full_from[0])
        totals = metrics.num_draft_tokens_per_pos
        num_draft_passes += len(totals) - len(depths) + sum(a > b for a, b in zip(totals, depths, strict=False))
        depths = list(totals)
    seconds = time.perf_counter() - start
    after = counters(metrics)
    counts = {name: value - before[name] for name, value in after.items()}
    return Generation(seconds, counts, num_draft_passes, full_batch_rate)


@dataclass(frozen=True)
class Floor:
    """How fast weights can be read at all."""

    bandwidth: float
    """bytes a second that a large copy reads and writes"""
    target_bytes: int
    draft_bytes: int

    def milliseconds(self, target_passes: float, draft_passes: float) -> float:
        return 1000 * (target_passes * self.target_bytes + draft_passes * self.draft_bytes) / self.bandwidth


def copy_bandwidth(device: torch.device) -> float:
    size = (4 << 30) if device.type == "cuda" else (64 << 20)
    source, best = torch.zeros(size, dtype=torch.uint8, device=device), math.inf
    dest = torch.empty_like(source)
    for _ in range(8):
        synchronize(device)
        start = time.perf_counter()
        dest.copy_(source)
        synchronize(device)
        best = min(best, time.perf_counter() - start)
    return 2 * size / best


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def summarize(cell: Cell, samples: Sequence[Generation], rates: Sequence[float], floor: Floor) -> Row:
    """A cell of the table. Times are per step, in milliseconds."""
    total: dict[str, float] = defaultdict(float)
    for one in samples:
        for name, value in one.counts.items():
            total[name] += value
    seconds = sum(one.seconds for one in samples)
    steps = max(total["num_steps"], 1.0)
    draft_passes = sum(one.num_draft_passes for one in samples)
    speeds = [cell.batch * cell.tokens / one.seconds for one in samples]
    full = [one.full_batch_rate for one in samples if one.full_batch_rate is not None]
    length = static_length(cell.policy)
    step_ms = 1000 * seconds / steps
    floor_ms = floor.milliseconds(1, draft_passes / steps)
    spread = steps_spread(rates, nominal_length(cell.policy), cell.tokens)
    excess, deviation = slowest(cell.batch, len(samples))
    return {
        **cell._asdict(),
        "rounds": [round(speed, 1) for speed in speeds],
        "tokens_per_s": statistics.median(speeds),
        "best_tokens_per_s": max(speeds),
        "full_batch_tokens_per_s": statistics.median(full) if full else None,
        "relative_error": deviation * spread,
        "expected_tail": excess * spread,
        "emitted_per_step": 1 + (total["num_accepted_tokens"] / total["num_drafts"] if total["num_drafts"] else 0.0),
        "expected_per_step": None if length is None else emitted_moments(rates, length)[0],
        "steps": int(total["num_steps"]),
        "step_ms": step_ms,
        "draft_passes_per_step": draft_passes / steps,
        "ms_per_draft_pass": 1000 * total["draft_s"] / draft_passes if draft_passes else None,
        "draft_ms": 1000 * total["draft_s"] / steps,
        "verify_ms": 1000 * total["target_s"] / steps,
        "sampling_ms": 1000 * total["accept_s"] / steps,
        "policy_ms": 1000 * total["plan_s"] / steps,
        "schedule_ms": 1000 * total["schedule_s"] / steps,
        "commit_ms": 1000 * total["commit_s"] / steps,
        "sampling_and_policy_share": (total["accept_s"] + total["plan_s"]) / seconds,
        "idle_share": total["idle_s"] / seconds if total["idle_s"] else None,
        "floor_ms": floor_ms,
        "times_floor": step_ms / floor_ms,
        "weights_tb_per_s": floor.bandwidth * floor_ms / step_ms / 1e12,
    }


def measure_floor(options: argparse.Namespace, report: Report) -> Floor:
    bandwidth = copy_bandwidth(torch.device(options.device))
    target, draft = (options.dtype.itemsize * SHAPES[name].num_read_weights() for name in options.shapes)
    floor = Floor(bandwidth, target, draft)
    report["copy_tb_per_s"] = bandwidth / 1e12
    report["target_floor_ms"], report["draft_floor_ms"] = floor.milliseconds(1, 0), floor.milliseconds(0, 1)
    print(
        f"copy bandwidth {bandwidth / 1e12:.2f} TB/s; reading the weights takes {report['target_floor_ms']:.2f} ms "
        f"(target) and {report['draft_floor_ms']:.2f} ms (draft)",
        flush=True,
    )
    return floor


class Bench:
    """Our engines, one for every policy over the same weights, and what they measure."""

    def __init__(self, options: argparse.Namespace, report: Report) -> None:
        self.began = time.perf_counter()
        self.options, self.report = options, report
        self.cells = plan_cells(options)
        self.floor = measure_floor(options, report)
        device = torch.device(options.device)
        self.models = [random_model(SHAPES[name], options.dtype, device, i) for i, name in enumerate(options.shapes)]
        self.engines: dict[str, Engine] = {}
        self.samples: dict[Cell, list[Generation]] = defaultdict(list)
        synchronize(device)
        report["models_s"] = time.perf_counter() - self.began
        print(f"models made in {report['models_s']:.1f} s\n\n{HEADER}", flush=True)

    def run(self) -> None:
        for batch in self.options.batches:
            self._run_batch([cell for cell in self.cells if cell.batch == batch])
        self.report["ours_s"] = time.perf_counter() - self.began

    def _run_batch(self, cells: Sequence[Cell]) -> None:
        """Policies take turns in every round: whatever else the machine does hits all of them."""
        failed: set[Cell] = set()
        for number in range(self.options.rounds + 1):
            if number > 1 and time.perf_counter() - self.began > self.options.time_limit:
                print(f"out of time after {number - 1} of {self.options.rounds} rounds", flush=True)
                break
            for cell in (cell for cell in cells if cell not in failed):
                try:
                    self._run_round(cell, number)
                except Exception as error:
                    # One failure must not cost the results of the others.
                    traceback.print_exc()
                    failed.add(cell)
                    self.engines.pop(cell.policy, None)
                    put(self.report["cells"], {**cell._asdict(), "error": f"{type(error).__name__}: {error}"})
                self.report.save()
        rows = {row["policy"]: row for row in self.report["cells"] if row["batch"] == cells[0].batch}
        for cell in cells:
            print(table_line(rows[cell.policy], rows.get("off")), flush=True)

    def _run_round(self, cell: Cell, number: int) -> None:
        engine = self._engine(cell.policy)
        long = generate(engine, cell.batch, cell.tokens + SHORT_TOKENS, number)
        if number == 0:
            # Compiled and captured what the batch needs, also while it shrinks towards its end.
            return
        short = generate(engine, cell.batch, SHORT_TOKENS, number)
        self.samples[cell].append(long.beyond(short))
        put(self.report["cells"], summarize(cell, self.samples[cell], self.options.acceptance, self.floor))

    def _engine(self, policy: str) -> Engine:
        if policy not in self.engines:
            target, draft = self.models
            cells = [cell for cell in self.cells if cell.policy == policy]
            self.engines[policy] = make_engine(target, draft, policy, self.options.acceptance, cells)
        return self.engines[policy]


def first_token(options: argparse.Namespace) -> Row:
    """Seconds from the start of a fresh process to its first token, and to its last."""
    command = [sys.executable, __file__, "--first-token-child", "--shapes", ",".join(options.shapes)]
    command += ["--device", options.device, "--dtype", str(options.dtype).removeprefix("torch.")]
    start, times = time.perf_counter(), []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(RESULT):
                times.append((line.removeprefix(RESULT).strip(), time.perf_counter() - start))
    if process.returncode:
        return {"error": f"the process ended with status {process.returncode}"}
    return dict(times)


def first_token_child(options: argparse.Namespace) -> None:
    """Begins as a user would: KV memory as large as there is room for, nothing warmed up."""
    device = torch.device(options.device)
    target, draft = (random_model(SHAPES[name], options.dtype, device, i) for i, name in enumerate(options.shapes))
    print(f"{RESULT}models", flush=True)
    config = EngineConfig(max_model_len=MAX_MODEL_LEN, synthetic_acceptance=tuple(options.acceptance))
    engine = assemble(target, draft, "static:4", config)
    print(f"{RESULT}engine", flush=True)
    params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
    engine.add(random_prompts(0, 1, target.config.vocab_size)[0], params)
    while engine.has_work:
        before = engine.metrics.num_emitted_tokens
        engine.step()
        if before == 0 and engine.metrics.num_emitted_tokens:
            print(f"{RESULT}first_token", flush=True)
    print(f"{RESULT}token_32", flush=True)


# vLLM's side


def measure_vllm(options: argparse.Namespace, report: Report) -> None:
    """vLLM on those of our cells whose length it is asked for, one process for every length."""
    planned = plan_cells(options)
    free, total = torch.cuda.mem_get_info() if options.device.startswith("cuda") else (1, 1)
    with tempfile.TemporaryDirectory() as folder:
        for name in set(options.shapes):
            (Path(folder) / name).mkdir()
            (Path(folder) / name / "config.json").write_text(json.dumps(SHAPES[name].hf_config()))
        target, draft = options.shapes
        for policy in options.vllm_lengths:
            cells = [(cell.batch, cell.tokens) for cell in planned if cell.policy == policy]
            if not cells:
                continue
            length = static_length(policy) or 0
            job = Job(
                target=str(Path(folder) / target),
                draft=str(Path(folder) / draft),
                vocab_size=SHAPES[target].vocab,
                length=length,
                # vLLM's rates are those of all tokens up to a position; ours are each token's own.
                acceptance=[float(rate) for rate in np.cumprod(options.acceptance[:length])],
                max_model_len=MAX_MODEL_LEN,
                gpu_memory_utilization=min(0.6, 0.95 * free / total),
                cells=cells,
                rounds=options.rounds,
            )
            run: Row = {"policy": policy}
            report["vllm_runs"].append(run)
            rounds: dict[int, list[Row]] = defaultdict(list)
            for event in vllm_run.run_process(job, options.vllm, options.vllm_timeout):
                if event.pop("event") == "round":
                    rounds[event["batch"]].append(event)
                    put(report["vllm_cells"], vllm_run.cell_row(policy, rounds[event["batch"]]))
                else:
                    run.update(event)
                report.save()
            for batch, _ in cells:
                if batch not in rounds:
                    error = run.get("error", "no result")
                    put(report["vllm_cells"], {"batch": batch, "policy": policy, "error": error})
            report.save()
            print("\n".join(vllm_run.run_lines(run, report["vllm_cells"])), flush=True)


# What it comes to


def key(row: Row) -> tuple[int, str]:
    return row["batch"], row["policy"]


def put(rows: list[Row], row: Row) -> None:
    """In place of what was known of the same cell."""
    rows[:] = [old for old in rows if key(old) != key(row)] + [row]


def statics(rows: Iterable[Row], batch: int) -> list[Row]:
    """Those that draft a fixed length."""
    return [row for row in rows if row["batch"] == batch and "error" not in row and static_length(row["policy"])]


def full_speed(row: Row | None) -> float | None:
    return row["full_batch_tokens_per_s"] if row else None


def best_static(rows: Iterable[Row], batch: int) -> Row | None:
    return max(statics(rows, batch), key=lambda row: float(row["tokens_per_s"]), default=None)


def cell_of(rows: Iterable[Row], batch: int, policy: str) -> Row | None:
    return next((row for row in rows if key(row) == (batch, policy) and "error" not in row), None)


class Verdict(NamedTuple):
    claim: str
    value: float | None
    """None: not measured"""
    limit: float
    at_least: bool

    @property
    def holds(self) -> bool | None:
        if self.value is None:
            return None
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    def line(self) -> str:
        outcome = {True: "yes", False: "NO", None: "?"}[self.holds]
        value = "not measured" if self.value is None else f"{self.value:.3f}"
        return f"{outcome:4}{self.claim}: {value} ({'at least' if self.at_least else 'at most'} {self.limit:g})"


def verdicts(report: Report) -> list[Verdict]:
    """What the GPU path promises, against what was measured."""
    ours, theirs = report["cells"], report["vllm_cells"]
    off, fastest = cell_of(ours, 1, "off"), best_static(ours, 1)
    found = []
    for batch, limit in ((1, 1.05), (8, 1.0), (64, 1.0), (256, 1.0)):
        ratio = speed_ratio(cell_of(ours, batch, "off"), cell_of(theirs, batch, "off"))
        found.append(Verdict(f"off against vLLM's, batch {batch}", ratio, limit, True))
    step = off["step_ms"] / report["target_floor_ms"] if off else None
    draft = fastest["ms_per_draft_pass"] / report["draft_floor_ms"] if fastest else None
    found.append(Verdict("a decode step at batch 1 over its floor", step, 1.25, False))
    found.append(Verdict("a draft step at batch 1 over its floor", draft, 1.8, False))
    for batch, limit in ((1, 1.3), (8, 1.4)):
        mine, other = best_static(ours, batch), best_static(theirs, batch)
        # A best is one of those that were tried: the line says which.
        tried = ", ".join(row["policy"] for row in statics(theirs, batch))
        names = f" ({mine['policy']} against {other['policy']} of {tried})" if mine and other else ""
        ratio = speed_ratio(mine, other)
        found.append(Verdict(f"best static against vLLM's best, batch {batch}{names}", ratio, limit, True))
    # As in a server, whose batch stays full: `off` has no end of a batch in which few are left.
    full = [full_speed(row) for row in (best_static(ours, 64), cell_of(ours, 64, "off"))]
    ratio = full[0] / full[1] if full[0] and full[1] else None
    shares = [row["sampling_and_policy_share"] for row in ours if row["batch"] == 64 and row.get("draft_ms")]
    idle = [row["idle_share"] for row in ours if row["batch"] == 1 and row.get("idle_share") is not None]
    start = report.get("first_token", {}).get("first_token")
    return [
        *found,
        Verdict("best static against our own off, full batch of 64", ratio, 1.25, True),
        Verdict("sampling, KLD and policy, share of a step, batch 64", max(shares, default=None), 0.05, False),
        Verdict("device idle, share of time, batch 1", max(idle, default=None), 0.05, False),
        Verdict("seconds from process start to first token", start, 40.0, False),
    ]


COLUMNS = ("step ms", "draft", "verify", "sample", "policy", "idle", "x floor")
HEADER = (
    f"{'batch':>5} {'policy':12}{'tokens/s':>10}{'+-':>6}{'vs off':>8}{'full':>9}{'emitted':>9}"
    + "".join(f"{column:>9}" for column in COLUMNS)
    + f"{'vLLM':>10}{'ratio':>7}"
)


def number(value: float | None, width: int, digits: int, unit: str = "") -> str:
    return f"{'-' if value is None else f'{value:.{digits}f}{unit}':>{width}}"


def percent(value: float | None, width: int) -> str:
    return number(None if value is None else 100 * value, width, 1, "%")


def table_line(row: Row, off: Row | None, other: Row | None = None) -> str:
    """A line under HEADER; `other` is the same cell of vLLM."""
    start = f"{row['batch']:5} {row['policy']:12}"
    if "error" in row:
        return f"{start}failed: {row['error'].splitlines()[0][:120]}"
    line = start + number(row["tokens_per_s"], 10, 1) + percent(row["relative_error"], 6)
    line += number(speed_ratio(row, None if off is None or "error" in off else off), 8, 2)
    line += number(row["full_batch_tokens_per_s"], 9, 0) + number(row["emitted_per_step"], 9, 2)
    for name in ("step_ms", "ms_per_draft_pass", "verify_ms", "sampling_ms", "policy_ms"):
        line += number(row[name], 9, 3)
    line += percent(row["idle_share"], 9) + number(row["times_floor"], 9, 2)
    if other is None:
        return line + number(None, 10, 1) + number(None, 7, 2)
    if "error" in other:
        return line + f"{'failed':>10}" + number(None, 7, 2)
    return line + number(other["tokens_per_s"], 10, 1) + number(speed_ratio(row, other), 7, 2)


def final_lines(report: Report) -> list[str]:
    """The whole table with vLLM beside it, the ratios of every batch, and the verdicts."""
    ours, theirs = report["cells"], report["vllm_cells"]
    by_key = {key(row): row for row in theirs}
    lines = [HEADER]
    lines += [table_line(row, cell_of(ours, row["batch"], "off"), by_key.get(key(row))) for row in ours]
    lines += [
        "draft: ms of one draft pass; verify, sample (with KLD), policy: ms of a step; idle: device without work;",
        "x floor: step over the time that reading its weights takes; full: tokens/s before the first request ended.",
    ]
    for batch in dict.fromkeys(row["batch"] for row in theirs):
        for what, mine, other in (
            ("off", cell_of(ours, batch, "off"), cell_of(theirs, batch, "off")),
            ("best static", best_static(ours, batch), best_static(theirs, batch)),
        ):
            ratio = speed_ratio(mine, other)
            if mine and other and ratio:
                lines.append(
                    f"batch {batch}, {what}: {mine['tokens_per_s']:.0f} ({mine['policy']}) against vLLM's "
                    f"{other['tokens_per_s']:.0f} ({other['policy']}): {ratio:.2f}x"
                )
    lines += [f"vLLM {run['policy']} failed: {run['error']}" for run in report["vllm_runs"] if "error" in run]
    return lines + [verdict.line() for verdict in verdicts(report)]


# The command


def parse_options() -> argparse.Namespace:
    def rates(text: str) -> list[float]:
        given = [float(item) for item in items(text)]
        return given + given[-1:] * (32 - len(given))

    parser = make_parser(__doc__)
    names = ", ".join(SHAPES)
    parser.add_argument("--batches", type=whole, default="1,8,64,256", help="empty: none")
    parser.add_argument("--shapes", type=items, default="8b,1b", help=f"two of {names}")
    parser.add_argument(
        "--policies", "--lengths", type=policy_names, help="for every batch, as in off,static:4,dsde or 0,2,4"
    )
    parser.add_argument("--lengths-by-batch", default=CELLS, help=f"default: {CELLS}")
    parser.add_argument("--acceptance", type=rates, default="0.8", help="by depth; the last one goes on")
    parser.add_argument("--rounds", type=int, default=3, help="the median counts")
    parser.add_argument("--error", type=float, default=0.02, help="standard error that random acceptance may cause")
    parser.add_argument("--tail", type=float, default=0.06, help="what a batch's slowest may need beyond the mean")
    parser.add_argument("--first-token", action="store_true", help="also time a fresh process to its first token")
    parser.add_argument("--first-token-child", action="store_true", help=argparse.SUPPRESS)
    vllm = parser.add_argument_group("vLLM")
    vllm.add_argument("--vllm", metavar="SITE", help="folder to import vLLM from, where it is not installed")
    vllm.add_argument("--no-vllm", action="store_true")
    vllm.add_argument(
        "--vllm-lengths",
        type=policy_names,
        default="0,4,3",
        help="those of our lengths it runs, in order (default: 0,4,3); on a cold machine each starts for about 110 s",
    )
    vllm.add_argument("--vllm-timeout", type=float, default=200.0, help="seconds for the process of one length")
    vllm.add_argument("--vllm-from", type=Path, metavar="FILE", help="take vLLM's figures from an earlier --out")
    options = parse(parser)
    if len(options.shapes) != 2 or any(name not in SHAPES for name in options.shapes):
        parser.error(f"--shapes takes two of {names}, got {','.join(options.shapes)}")
    return options


def main() -> None:
    options = parse_options()
    if options.first_token_child:
        first_token_child(options)
        return
    report = Report(options, cells=[], vllm_runs=[], vllm_cells=[])
    if options.first_token:
        report["first_token"] = first_token(options)
        print("seconds from the start of a process:", json.dumps(report["first_token"]), flush=True)
        report.save()
    if options.batches:
        Bench(options, report).run()
        # vLLM wants most of the memory.
        gc.collect()
        torch.cuda.empty_cache()
    if options.vllm_from:
        earlier = json.loads(options.vllm_from.read_text())
        report["vllm_runs"], report["vllm_cells"] = earlier["vllm_runs"], earlier["vllm_cells"]
        report["vllm_from"] = options.vllm_from.name
        print(f"vLLM's figures are those of an earlier run, {options.vllm_from.name}", flush=True)
    elif not options.no_vllm:
        if options.vllm or importlib.util.find_spec("vllm"):
            measure_vllm(options, report)
        else:
            print("vLLM is not importable: its side is left out (--vllm SITE)", flush=True)
    report["verdicts"] = [{**verdict._asdict(), "holds": verdict.holds} for verdict in verdicts(report)]
    report.save()
    print("\n" + "\n".join(final_lines(report)))


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
