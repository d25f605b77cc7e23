"""Decoding speed on a GPU: against the memory's speed, against vLLM, and of every part of a step.

    python benchmarks/gpu.py --out gpu.json [--vllm SITE] [--first-token]
    python benchmarks/gpu.py --pair TARGET DRAFT --prompts spec_bench_question.jsonl HumanEval.jsonl.gz --out pair.json

Without `--pair` the weights are random, in the shapes of an 8B target and a 1B draft, and a drafted token is accepted
with a given probability (0.8) if those before it were. Decoding speed is the difference between a long and a short
generation from 128-token prompts, so that prefill cancels. How many tokens are generated follows from the variance of
what a step emits: the standard error of every figure, as far as acceptance is random, is below `--error`. With vLLM
importable (or its site folder given), vLLM then does the same with the same shapes, prompts, counts and acceptance.

With `--pair`, real models answer real questions by category. Every group of prompts runs twice, and the second run
counts: kernels are compiled and prompts cached by then, so that what is measured is decoding.

Everything measured so far is in `--out` after every measurement: an interrupted run loses nothing.
"""

from __future__ import annotations

import argparse
import gc
import gzip
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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from dsde import LLM, SamplingParams  # isort: skip  (before torch, as in cpu.py)
import numpy as np
import torch

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
from vllm_run import (
    PROMPT_TOKENS,
    RESULT,
    SHORT_TOKENS,
    WARMUP_TOKENS,
    Job,
    prompt_seed,
    random_prompts,
    run_process,
)

Report = dict[str, Any]
Row = dict[str, Any]

CELLS = "1=0,2,3,4,5,6;8=0,2,3,4,5;64=0,1,2,3,dsde;256=0,1"
MAX_MODEL_LEN = 2048
MAX_NUM_BATCHED_TOKENS = 8192
NOMINAL_LENGTH = 4
"""what the noise of a policy with varying lengths is worked out for"""
MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")


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
    "tiny": Shape(64, 2, 128, 4, 2, 16, 512),
}


# How much to generate


def emitted_moments(rates: Sequence[float], length: int) -> tuple[float, float]:
    """Mean and variance of the tokens that one step of one sequence emits."""
    survival = np.cumprod([1.0, *rates[:length]])
    mean = float(survival.sum())
    return mean, float(((2 * np.arange(len(survival)) + 1) * survival).sum()) - mean**2


@lru_cache
def slowest_spread(batch: int, rounds: int) -> float:
    """Standard deviation of a median over rounds of the largest of `batch` standard normals.

    A batch has finished when its unluckiest sequence has.
    """
    draws = np.random.default_rng(0).standard_normal((4000, rounds, batch))
    return float(np.median(draws.max(axis=2), axis=1).std())


def relative_error(rates: Sequence[float], length: int, batch: int, tokens: int, rounds: int) -> float:
    """Standard error of a speed, relative to it, that random acceptance causes."""
    mean, variance = emitted_moments(rates, length)
    # The steps that a sequence needs are those of a renewal process: T / mean, with variance T * variance / mean^3.
    return slowest_spread(batch, rounds) * math.sqrt(variance / (mean * tokens))


def tokens_needed(rates: Sequence[float], length: int, batch: int, rounds: int, error: float) -> int:
    """Tokens a sequence must generate in every round for the error to stay below `error`."""
    for_noise = (relative_error(rates, length, batch, 1, rounds) / error) ** 2
    # Enough steps for a steady mean even where nothing is random.
    least = 256 if batch < 64 else 96
    return 16 * math.ceil(max(for_noise, least) / 16)


class Cell(NamedTuple):
    batch: int
    policy: str
    tokens: int
    """that each sequence generates in the long run beyond the short one"""


def policy_name(item: str) -> str:
    """`0` and `4` are short for `off` and `static:4`."""
    return ("off" if int(item) == 0 else f"static:{item}") if item.isdigit() else item


def static_length(policy: str) -> int | None:
    """None: it varies."""
    if policy == "off":
        return 0
    name, _, length = policy.partition(":")
    return int(length) if name == "static" and length.isdigit() else None


def policies_of(batch: int, by_batch: str) -> list[str]:
    """Of an unknown batch: those of the largest known one that is not larger."""
    plan = {int(key): value for key, _, value in (part.partition("=") for part in by_batch.split(";"))}
    known = max((key for key in plan if key <= batch), default=min(plan))
    return [policy_name(item.strip()) for item in plan[known].split(",")]


def plan_cells(options: argparse.Namespace) -> list[Cell]:
    cells = []
    for batch in options.batches:
        chosen = options.policies or [policy_name(item) for item in options.lengths or []]
        for policy in chosen or policies_of(batch, options.lengths_by_batch):
            length = static_length(policy)
            length = NOMINAL_LENGTH if length is None else length
            tokens = tokens_needed(options.acceptance, length, batch, options.rounds, options.error)
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
        # As much as vLLM reads at once, or early requests would have finished before late ones begin.
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


def sample(engine: Engine, cell: Cell, round_number: int) -> Generation:
    """One round of one cell."""
    long = generate(engine, cell.batch, cell.tokens + SHORT_TOKENS, round_number)
    return long.beyond(generate(engine, cell.batch, SHORT_TOKENS, round_number))


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
    noise = NOMINAL_LENGTH if length is None else length
    return {
        **cell._asdict(),
        "rounds": [round(speed, 1) for speed in speeds],
        "tokens_per_s": statistics.median(speeds),
        "best_tokens_per_s": max(speeds),
        "full_batch_tokens_per_s": statistics.median(full) if full else None,
        "relative_error": relative_error(rates, noise, cell.batch, cell.tokens, len(samples)),
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

    def __init__(self, options: argparse.Namespace, report: Report, save: Callable[[], None]) -> None:
        self.began = time.perf_counter()
        self.options, self.report, self.save = options, report, save
        self.cells = plan_cells(options)
        self.floor = measure_floor(options, report)
        device = torch.device(options.device)
        self.models = [random_model(SHAPES[name], options.dtype, device, i) for i, name in enumerate(options.shapes)]
        self.engines: dict[str, Engine] = {}
        synchronize(device)
        report["models_s"] = time.perf_counter() - self.began
        print(f"models made in {report['models_s']:.1f} s\n\n{HEADER}", flush=True)

    def run(self) -> None:
        for batch in self.options.batches:
            self._run_batch([cell for cell in self.cells if cell.batch == batch])
        self.report["ours_s"] = time.perf_counter() - self.began

    def _run_batch(self, cells: Sequence[Cell]) -> None:
        """Policies take turns in every round: whatever else the machine does hits all of them."""
        rows: dict[str, Row] = {}
        samples: dict[str, list[Generation]] = defaultdict(list)

        def attempt(cell: Cell, measurement: Callable[[], None]) -> None:
            """One failure must not cost the results of the others."""
            if "error" in rows.get(cell.policy, {}):
                return
            try:
                measurement()
            except Exception as error:
                traceback.print_exc()
                rows[cell.policy] = {**cell._asdict(), "error": f"{type(error).__name__}: {error}"}
                self.engines.pop(cell.policy, None)
            self._note(rows.get(cell.policy))

        def measure(cell: Cell, number: int) -> None:
            samples[cell.policy].append(sample(self._engine(cell.policy), cell, number))
            rows[cell.policy] = summarize(cell, samples[cell.policy], self.options.acceptance, self.floor)

        for cell in cells:
            attempt(cell, lambda c=cell: warm_up(self._engine(c.policy), c.batch))  # type: ignore[misc]
        for number in range(1, self.options.rounds + 1):
            if number > 1 and time.perf_counter() - self.began > self.options.time_limit:
                print(f"out of time after {number - 1} of {self.options.rounds} rounds", flush=True)
                break
            for cell in cells:
                attempt(cell, lambda c=cell, n=number: measure(c, n))  # type: ignore[misc]
        for cell in cells:
            print(table_line(rows[cell.policy], rows.get("off")), flush=True)

    def _engine(self, policy: str) -> Engine:
        if policy not in self.engines:
            target, draft = self.models
            cells = [cell for cell in self.cells if cell.policy == policy]
            self.engines[policy] = make_engine(target, draft, policy, self.options.acceptance, cells)
        return self.engines[policy]

    def _note(self, row: Row | None) -> None:
        if row is not None:
            self.report["cells"] = [old for old in self.report["cells"] if key(old) != key(row)] + [row]
            self.save()


def warm_up(engine: Engine, batch: int) -> None:
    """Compile and capture what the batch will need, also while it shrinks towards its end."""
    generate(engine, batch, WARMUP_TOKENS, 0)


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


def measure_vllm(options: argparse.Namespace, report: Report, save: Callable[[], None]) -> None:
    """vLLM on those of our cells whose length it is asked for, one process for every length."""
    cells = {
        length: [c for c in plan_cells(options) if static_length(c.policy) == length] for length in options.vllm_lengths
    }
    free, total = torch.cuda.mem_get_info() if options.device.startswith("cuda") else (1, 1)
    with tempfile.TemporaryDirectory() as folder:
        for name in set(options.shapes):
            (Path(folder) / name).mkdir()
            (Path(folder) / name / "config.json").write_text(json.dumps(SHAPES[name].hf_config()))
        target, draft = options.shapes
        for length in (length for length in options.vllm_lengths if cells[length]):
            job = Job(
                target=str(Path(folder) / target),
                draft=str(Path(folder) / draft),
                vocab_size=SHAPES[target].vocab,
                length=length,
                # vLLM's rates are those of all tokens up to a position; ours are each token's own.
                acceptance=[float(rate) for rate in np.cumprod(options.acceptance[:length])],
                max_model_len=MAX_MODEL_LEN,
                gpu_memory_utilization=min(0.6, 0.95 * free / total),
                cells=[(cell.batch, cell.tokens) for cell in cells[length]],
                rounds=options.rounds,
            )
            policy = policy_name(str(length))
            run: Row = {"policy": policy}
            report["vllm_runs"].append(run)
            for event in run_process(job, options.vllm, options.vllm_timeout):
                note_vllm(event, run, report["vllm_cells"])
                save()
            for batch, _ in job.cells:
                if not any(key(row) == (batch, policy) for row in report["vllm_cells"]):
                    report["vllm_cells"].append(
                        {"batch": batch, "policy": policy, "error": run.get("error", "no result")}
                    )
            save()
            print("\n".join(vllm_lines(run, report["vllm_cells"])), flush=True)


def note_vllm(event: Row, run: Row, cells: list[Row]) -> None:
    """Add one event of vLLM's process to what is known of its run and its cells."""
    if event["event"] != "round":
        run.update({name: value for name, value in event.items() if name != "event"})
        return
    row = next((row for row in cells if key(row) == (event["batch"], run["policy"])), None)
    if row is None:
        row = {"batch": event["batch"], "policy": run["policy"], "tokens": event["tokens"], "seconds": [], "steps": []}
        cells.append(row)
    row["seconds"].append(event["seconds"])
    row["steps"].append(event["steps"])
    speeds = [row["batch"] * row["tokens"] / seconds for seconds in row["seconds"]]
    steps = max(sum(row["steps"]), 1)
    row["rounds"] = [round(speed, 1) for speed in speeds]
    row["tokens_per_s"] = statistics.median(speeds)
    row["step_ms"] = 1000 * sum(row["seconds"]) / steps
    row["tokens_per_step"] = row["tokens"] * len(speeds) / steps


def vllm_lines(run: Row, cells: Iterable[Row]) -> list[str]:
    started = f"started in {run['init_s']:.0f} s" if "init_s" in run else "did not start"
    failed = f"; failed: {run['error']}" if "error" in run else ""
    lines = [f"vLLM {run['policy']}: {started}, {run['seconds']:.0f} s in all{failed}"]
    for row in cells:
        if row["policy"] == run["policy"] and "error" not in row:
            lines.append(
                f"  batch {row['batch']:3}: {row['tokens_per_s']:9.1f} tokens/s, {row['step_ms']:.2f} ms a step, "
                f"{row['tokens_per_step']:.2f} tokens a step and sequence; rounds {row['rounds']}"
            )
    return lines


# What it comes to


def key(row: Row) -> tuple[int, str]:
    return row["batch"], row["policy"]


def best_static(rows: Iterable[Row], batch: int) -> Row | None:
    """The fastest of those that draft a fixed length."""
    mine = [row for row in rows if row["batch"] == batch and "error" not in row and (static_length(row["policy"]) or 0)]
    return max(mine, key=lambda row: float(row["tokens_per_s"]), default=None)


def cell_of(rows: Iterable[Row], batch: int, policy: str) -> Row | None:
    return next((row for row in rows if key(row) == (batch, policy) and "error" not in row), None)


def speed_ratio(first: Row | None, second: Row | None) -> float | None:
    return first["tokens_per_s"] / second["tokens_per_s"] if first and second else None


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
    found = []
    for batch, limit in ((1, 1.05), (8, 1.0), (64, 1.0), (256, 1.0)):
        ratio = speed_ratio(cell_of(ours, batch, "off"), cell_of(theirs, batch, "off"))
        found.append(Verdict(f"off against vLLM's, batch {batch}", ratio, limit, True))
    off = cell_of(ours, 1, "off")
    step = off["step_ms"] / report["target_floor_ms"] if off else None
    found.append(Verdict("a decode step at batch 1 over its floor", step, 1.25, False))
    fastest = best_static(ours, 1)
    draft = fastest["ms_per_draft_pass"] / report["draft_floor_ms"] if fastest else None
    found.append(Verdict("a draft step at batch 1 over its floor", draft, 1.8, False))
    for batch, limit in ((1, 1.3), (8, 1.4)):
        mine, other = best_static(ours, batch), best_static(theirs, batch)
        # A best is one of those that were tried: the line says which.
        tried = [row["policy"] for row in theirs if row["batch"] == batch and static_length(row["policy"])]
        tried = [policy for policy in tried if cell_of(theirs, batch, policy)]
        names = f" ({mine['policy']} against {other['policy']} of {', '.join(tried)})" if mine and other else ""
        ratio = speed_ratio(mine, other)
        found.append(Verdict(f"best static against vLLM's best, batch {batch}{names}", ratio, limit, True))
    ratio = speed_ratio(best_static(ours, 64), cell_of(ours, 64, "off"))
    found.append(Verdict("best static against our own off, batch 64", ratio, 1.25, True))
    shares = [row["sampling_and_policy_share"] for row in ours if row["batch"] == 64 and row.get("draft_ms")]
    found.append(Verdict("sampling, KLD and policy, share of a step, batch 64", max(shares, default=None), 0.05, False))
    idle = [row["idle_share"] for row in ours if row["batch"] == 1 and row.get("idle_share") is not None]
    found.append(Verdict("device idle, share of time, batch 1", max(idle, default=None), 0.05, False))
    start = report.get("first_token", {}).get("first_token")
    found.append(Verdict("seconds from process start to first token", start, 40.0, False))
    return found


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


# Real pairs


def read_questions(paths: Sequence[Path]) -> dict[str, list[str]]:
    """Prompts by category, from JSON lines, gzipped or not. MT-Bench's eight subjects are one category."""
    questions: dict[str, list[str]] = defaultdict(list)
    for path in paths:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        for line in content.decode().splitlines():
            row = json.loads(line)
            category = str(row.get("category", path.name.partition(".")[0]))
            prompt = row["turns"][0] if "turns" in row else row["prompt"]
            questions["mt_bench" if category in MT_BENCH else category].append(prompt)
    return questions


def take(prompts: list[list[int]], count: int) -> list[list[int]]:
    """`count` prompts, from the beginning again where there are too few."""
    return [prompts[i % len(prompts)] for i in range(count)]


def answer(llm: LLM, prompts: list[list[int]], batch: int, params: SamplingParams) -> tuple[float, list[list[int]]]:
    """Seconds and answers, `batch` prompts at a time."""
    answers: list[list[int]] = []
    start = time.perf_counter()
    for first in range(0, len(prompts), batch):
        outputs = llm.generate(prompts[first : first + batch], params)
        answers += [output.outputs[0].token_ids for output in outputs]
    return time.perf_counter() - start, answers


def measure_pair(options: argparse.Namespace, report: Report, save: Callable[[], None]) -> None:
    began = time.perf_counter()
    target, draft = options.pair
    base = LLM(
        target,
        draft,
        "off",
        dtype=str(options.dtype).removeprefix("torch."),
        device=options.device,
        max_num_seqs=max(options.batches),
        max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
        max_model_len=options.max_model_len,
        kv_cache_bytes=options.kv_gib << 30,
    )
    policies = options.policies or ["off", "static:2", "static:4", "static:8", "dsde"]
    engines = {policy: base if policy == "off" else base.with_policy(policy) for policy in policies}
    report["models_s"] = time.perf_counter() - began
    print(f"models loaded in {report['models_s']:.1f} s", flush=True)
    params = SamplingParams(temperature=0, max_tokens=options.tokens)
    most = max(options.per_category, *options.batches)
    encoded = {
        category: [base.chat_prompt([{"role": "user", "content": text}]) for text in texts[:most]]
        for category, texts in read_questions(options.prompts).items()
    }
    for batch in options.batches:
        for category, questions in encoded.items():
            prompts = take(questions, max(batch, options.per_category))
            baseline: list[list[int]] = []
            for policy in policies:
                if time.perf_counter() - began > options.time_limit:
                    print(f"past {options.time_limit:.0f} s: the rest is left out", flush=True)
                    return
                answer(engines[policy], prompts, batch, params)
                before = counters(engines[policy].metrics)
                seconds, answers = answer(engines[policy], prompts, batch, params)
                after = counters(engines[policy].metrics)
                baseline = baseline or answers
                counts = {name: after[name] - before[name] for name in after}
                report["pair_cells"].append(pair_row(batch, category, policy, seconds, answers, baseline, counts))
                save()
                print(pair_line(report["pair_cells"][-1]), flush=True)
    report["ours_s"] = time.perf_counter() - began


def pair_row(
    batch: int,
    category: str,
    policy: str,
    seconds: float,
    answers: list[list[int]],
    baseline: list[list[int]],
    counts: dict[str, float],
) -> Row:
    drafted, accepted, drafts = (counts[f"num_{what}"] for what in ("draft_tokens", "accepted_tokens", "drafts"))
    tokens = sum(map(len, answers))
    return {
        "batch": batch,
        "category": category,
        "policy": policy,
        "prompts": len(answers),
        "tokens": tokens,
        "tokens_per_s": tokens / seconds,
        "acceptance_rate": accepted / drafted if drafted else None,
        "emitted_per_step": 1 + accepted / drafts if drafts else 1.0,
        "num_draft_tokens": drafted,
        "num_accepted_tokens": accepted,
        "num_drafts": drafts,
        "seconds": seconds,
        "step_ms": 1000 * seconds / max(counts["num_steps"], 1),
        # In bfloat16 a batch of another shape may round another way: near ties fall differently.
        "answers_as_first_policy": sum(a == b for a, b in zip(answers, baseline, strict=True)) / len(answers),
    }


def pair_line(row: Row) -> str:
    rate = "-" if row["acceptance_rate"] is None else f"{row['acceptance_rate']:.3f}"
    return (
        f"batch {row['batch']:3} {row['category']:16}{row['policy']:12}{row['tokens_per_s']:9.1f} tokens/s  accepted "
        f"{rate:>5}  emitted {row['emitted_per_step']:.2f}  equal answers {row['answers_as_first_policy']:.2f}"
    )


def merged(rows: Sequence[Row]) -> Row:
    """Several cells of one policy as one."""
    total = {name: sum(row[name] for row in rows) for name in ("tokens", "seconds", "num_draft_tokens", "num_drafts")}
    accepted = sum(row["num_accepted_tokens"] for row in rows)
    return {
        "tokens_per_s": total["tokens"] / total["seconds"],
        "acceptance_rate": accepted / total["num_draft_tokens"] if total["num_draft_tokens"] else None,
        "emitted_per_step": 1 + accepted / total["num_drafts"] if total["num_drafts"] else 1.0,
    }


def pair_markdown(rows: Sequence[Row]) -> str:
    """A table for every batch: categories down, policies across."""
    policies = list(dict.fromkeys(row["policy"] for row in rows))
    lines = ["Each entry: tokens/s (against off), acceptance, tokens emitted per step."]
    for batch in dict.fromkeys(row["batch"] for row in rows):
        groups: dict[str, dict[str, list[Row]]] = defaultdict(lambda: defaultdict(list))
        for row in rows:
            if row["batch"] == batch:
                groups[row["category"]][row["policy"]].append(row)
        complete = [group for group in groups.values() if len(group) == len(policies)]
        if len(complete) > 1:
            groups["all"] = {name: [row for group in complete for row in group[name]] for name in policies}
        lines += ["", f"| batch {batch} | {' | '.join(policies)} |", "| --- |" + " --- |" * len(policies)]
        for category, group in groups.items():
            cells = {name: merged(group[name]) for name in policies if name in group}
            entries = [markdown_entry(cells.get(name), cells.get("off")) for name in policies]
            lines.append(f"| {category} | {' | '.join(entries)} |")
    return "\n".join(lines)


def markdown_entry(cell: Row | None, off: Row | None) -> str:
    if cell is None:
        return "-"
    text = f"{cell['tokens_per_s']:.0f}"
    if cell["acceptance_rate"] is None:
        return text
    ratio = speed_ratio(cell, off)
    text += "" if ratio is None else f" ({ratio:.2f}x)"
    return f"{text}, {cell['acceptance_rate']:.2f}, {cell['emitted_per_step']:.2f}"


# The command


def parse() -> argparse.Namespace:
    def items(text: str) -> list[str]:
        return [item.strip() for item in text.split(",") if item.strip()]

    def whole(text: str) -> list[int]:
        return [int(item) for item in items(text)]

    def rates(text: str) -> list[float]:
        given = [float(item) for item in items(text)]
        return given + given[-1:] * (32 - len(given))

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON, rewritten after every measurement")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", help="default: bfloat16 on a GPU, float32 on a CPU")
    parser.add_argument("--batches", type=whole, help="default: 1,8,64,256, with --pair 1,8,32,64; empty: none")
    parser.add_argument("--policies", type=items, help="for every batch, as in off,static:4,dsde")
    parser.add_argument("--time-limit", type=float, default=math.inf, help="seconds after which nothing more begins")
    synthetic = parser.add_argument_group("random weights")
    synthetic.add_argument("--shapes", type=items, default=["8b", "1b"], help=f"two of {', '.join(SHAPES)}")
    synthetic.add_argument("--lengths", type=items, help="for every batch, as in 0,2,4; 0 is off")
    synthetic.add_argument("--lengths-by-batch", default=CELLS, help=f"default: {CELLS}")
    synthetic.add_argument("--acceptance", type=rates, default=rates("0.8"), help="by depth; the last one goes on")
    synthetic.add_argument("--rounds", type=int, default=3, help="the median counts")
    synthetic.add_argument("--error", type=float, default=0.02, help="standard error that random acceptance may cause")
    synthetic.add_argument("--first-token", action="store_true", help="also time a fresh process to its first token")
    synthetic.add_argument("--first-token-child", action="store_true", help=argparse.SUPPRESS)
    vllm = parser.add_argument_group("vLLM")
    vllm.add_argument("--vllm", metavar="SITE", help="folder to import vLLM from, where it is not installed")
    vllm.add_argument("--no-vllm", action="store_true")
    vllm.add_argument("--vllm-lengths", type=whole, default=[0, 4, 3, 5], help="those of our lengths it runs, in order")
    vllm.add_argument("--vllm-timeout", type=float, default=150.0, help="seconds for the process of one length")
    vllm.add_argument("--vllm-from", type=Path, metavar="FILE", help="take vLLM's figures from an earlier --out")
    pair = parser.add_argument_group("real pairs")
    pair.add_argument("--pair", nargs=2, metavar=("TARGET", "DRAFT"))
    pair.add_argument("--prompts", type=Path, nargs="+", help="JSON lines with `turns` or `prompt`, and a `category`")
    pair.add_argument("--per-category", type=int, default=4, help="at least so many questions, whatever the batch")
    pair.add_argument("--tokens", type=int, default=128)
    pair.add_argument("--max-model-len", type=int, default=4096)
    pair.add_argument("--kv-gib", type=int, default=8, help="KV memory of every policy")
    options = parser.parse_args()
    if options.pair and not options.prompts:
        parser.error("--pair needs --prompts")
    if len(options.shapes) != 2 or any(name not in SHAPES for name in options.shapes):
        parser.error(f"--shapes takes two of {', '.join(SHAPES)}, got {','.join(options.shapes)}")
    if options.batches is None:
        options.batches = [1, 8, 32, 64] if options.pair else [1, 8, 64, 256]
    is_gpu = options.device.startswith("cuda")
    options.dtype = getattr(torch, options.dtype or ("bfloat16" if is_gpu else "float32"))
    return options


def machine(device: str) -> str:
    name = torch.cuda.get_device_name(device) if device.startswith("cuda") else "CPU"
    return f"{name}, torch {torch.__version__}"


def main() -> None:
    options = parse()
    if options.first_token_child:
        first_token_child(options)
        return
    report: Report = {
        "machine": machine(options.device),
        "command": " ".join(sys.argv[1:]),
        "cells": [],
        "vllm_runs": [],
        "vllm_cells": [],
        "pair_cells": [],
    }
    print(f"{report['machine']}, {options.dtype}".replace("torch.", ""), flush=True)

    def save() -> None:
        if options.out:
            draft = options.out.with_suffix(".tmp")
            draft.write_text(json.dumps(report, indent=1))
            draft.replace(options.out)

    if options.pair:
        try:
            measure_pair(options, report, save)
        finally:
            report["markdown"] = pair_markdown(report["pair_cells"])
            save()
            print("\n" + report["markdown"], flush=True)
        return
    if options.first_token:
        report["first_token"] = first_token(options)
        print("seconds from the start of a process:", json.dumps(report["first_token"]), flush=True)
        save()
    if options.batches:
        Bench(options, report, save).run()
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
            measure_vllm(options, report, save)
        else:
            print("vLLM is not importable: its side is left out (--vllm SITE)", flush=True)
    report["verdicts"] = [{**verdict._asdict(), "holds": verdict.holds} for verdict in verdicts(report)]
    save()
    print("\n" + "\n".join(final_lines(report)))


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
