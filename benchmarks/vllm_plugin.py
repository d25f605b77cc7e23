"""The vLLM plugin on a GPU: against vLLM without speculation, with fixed lengths, and with its table by batch size.

    python benchmarks/vllm_plugin.py --out plugin.json [--vllm SITE]           # made-up weights and acceptance
    python benchmarks/vllm_plugin.py --target FOLDER --draft FOLDER --out pair.json    # a real pair

Decoding is measured from the step with which the last request has its first token to the end; a round that nobody
measures comes first, for the plugin's policies `--learn-rounds` of them, and of the others the fastest counts. Every
engine of vLLM is a process of its own; policies of the plugin share one, since they can be changed while it runs.
`--together` so many engines start at the same time and share the GPU, and then measure one at a time, in turns, and on
the same cores of the host: what is compared is measured side by side. Where the host decides, turns between which it
became faster or slower are told from others (`host_pace.py`). vLLM without speculation is measured in every such group,
as `off@2` in the second. vLLM's table is made of what the fixed lengths of earlier groups measured, so it comes last:
the best of them for every batch.

Everything measured is in `--out` after every round, with what a policy has learnt of costs by then; a second run with
the same file goes on where the first stopped.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import queue
import random
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

RESULT = "RESULT "
HERE = Path(__file__).resolve().parent
PROMPT_TOKENS = 64
WARM_UP_TOKENS = 32
"""enough for an engine that learns nothing"""
TOKENS = {1: 384, 8: 256, 64: 128, 256: 96}
"""that each request generates, by batch"""
ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
}
COUNTS = ("num_steps", "num_off_steps", "num_draft_tokens", "num_accepted_tokens", "num_catch_up_tokens")
Row = dict[str, Any]
Cells = dict[str, list[int]]
"""batches by variant"""


def engine_of(variant: str) -> str:
    return "plugin" if variant.startswith("plugin:") else variant


def make_prompts(batch: int, number: int, texts: list[str], vocab_size: int) -> list[Row]:
    """Of one round, the same for every variant."""
    rng = random.Random(f"{batch} {number}")
    if texts:
        return [{"prompt": rng.choice(texts)} for _ in range(batch)]
    most = min(vocab_size, 100_000)
    return [{"prompt_token_ids": [rng.randrange(10, most) for _ in range(PROMPT_TOKENS)]} for _ in range(batch)]


# The other side: a process that is one engine, and measures what it is asked for


def serve() -> None:
    """The first line of input is the job, every other one a round; one line answers each."""
    begin = time.perf_counter()
    sys.path.append(str(HERE))  # behind everything else: nothing of it may hide modules of vLLM
    engine = Engine(json.loads(sys.stdin.readline()))
    ready = {"init_s": time.perf_counter() - begin, "machine": engine.machine}
    print(RESULT + json.dumps(ready), flush=True)
    for line in sys.stdin:
        print(RESULT + json.dumps(engine.measure(**json.loads(line))), flush=True)


class Engine:
    """One engine of vLLM, and what is measured with it."""

    def __init__(self, job: Row) -> None:
        self.job = job
        self.batch = 0
        """requests of the generation under way"""
        self.begun: tuple[float, int] | None = None
        """when all of them had their first token, and how many tokens there were by then"""
        self.step_ends: list[float] = []
        """of all steps since then"""
        self.faults_before = 0
        """page faults of this thread until then"""
        self.controllers: dict[str, Any] = {}
        if job["policy"]:
            from dsde.integrations.vllm.plugin import register

            # The environment and not `additional_config`, which is part of the key of vLLM's compile cache.
            os.environ["DSDE_POLICY"] = job["policy"]
            register()
        import torch
        import vllm

        self.torch, self.vllm = torch, vllm
        self.has_gpu = torch.cuda.is_available()
        name = torch.cuda.get_device_name() if self.has_gpu else "CPU"
        self.machine = f"{name}, vLLM {vllm.__version__}, torch {torch.__version__}"
        self.llm = vllm.LLM(**job["options"])
        step = self.llm.llm_engine.step

        def counted_step() -> Any:
            outputs = step()
            if self.begun is None:
                self.begun = self._find_begun()
                self.faults_before = count_page_faults()
            else:
                self.step_ends.append(time.perf_counter())
            return outputs

        self.llm.llm_engine.step = counted_step

    def measure(self, variant: str, batch: int, tokens: int, number: int, depth: int) -> Row:
        """Rounds up to 0 are there to warm up and, for a policy, to learn. From a call that is so much deeper than it
        must be: programs differ in that, and for vLLM it is not the same."""
        meter = self._obey(variant.removeprefix("plugin:")) if variant.startswith("plugin:") else {}
        counted = {name: meter[name] for name in COUNTS if variant.startswith("plugin:")}
        from cores import keep_to_cores  # not at the top, where an engine's process does not see them yet
        from host_pace import pace_ms

        cores = keep_to_cores() if self.has_gpu else []
        before_ms = pace_ms()
        found = call_deeper(depth, lambda: self._generate(batch, tokens, number))
        found |= {"cores": cores, "number": number, "host_ms": [before_ms, pace_ms()]}
        found |= {f"plugin_{name}": meter[name] - counted[name] for name in counted}
        if counted:
            policy = self.controllers[variant.removeprefix("plugin:")].policy
            found["learnt"] = [cost.to_dict() for cost in policy.cost_models]
        return found

    def _obey(self, policy: str) -> Any:
        """From now on, with what it has learnt when it was obeyed before; its meter."""
        from dsde.integrations.vllm import running, scheduling
        from dsde.integrations.vllm.settings import Settings

        os.environ["DSDE_POLICY"] = policy
        core = self._core()
        if policy not in self.controllers:
            self.controllers[policy] = scheduling.steer(core.scheduler, Settings(policy=policy))
        setattr(core.scheduler, scheduling.CONTROLLER, self.controllers[policy])
        runner = core.model_executor.driver_worker.worker.model_runner
        if hasattr(runner, running.ADAPTER):
            delattr(runner, running.ADAPTER)
        return self.controllers[policy].meter

    def _generate(self, batch: int, tokens: int, number: int) -> Row:
        """So many tokens of each request: how many of them came after all had begun, in how long and how many steps."""
        prompts = make_prompts(batch, number, self.job["prompts"], self.job["vocab_size"])
        params = self.vllm.SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        self.step_ends, self.begun, self.batch = [], None, batch
        self.llm.generate(prompts, params, use_tqdm=False)
        end, num_faults = time.perf_counter(), count_page_faults() - self.faults_before
        assert self.begun is not None, f"{tokens} tokens are too few: some requests ended before others began"
        begin, num_before = self.begun
        # With asynchronous scheduling one more step is under way, which must not disturb whose turn is next.
        if self.has_gpu:
            self.torch.cuda.synchronize()
        ends = [begin, *self.step_ends]
        found = {"tokens": batch * tokens - num_before, "seconds": end - begin, "steps": len(self.step_ends)}
        gaps = [after - before for before, after in itertools.pairwise(ends)]
        # More than a few in a step: Python's stack grows and shrinks in it, which src/dsde/core/call_room.py avoids.
        found["page_faults_per_step"] = num_faults / max(len(gaps), 1)
        found["steps_ms"] = [round(1e3 * gap, 2) for gap in gaps]
        return found | {"median_step_s": statistics.median(gaps) if gaps else 0.0}

    def _find_begun(self) -> tuple[float, int] | None:
        counts = [request.num_output_tokens for request in self._core().scheduler.requests.values()]
        return (time.perf_counter(), sum(counts)) if len(counts) == self.batch and all(counts) else None

    def _core(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core


def count_page_faults() -> int:
    """Of this thread, where the system counts them by thread."""
    return resource.getrusage(getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF)).ru_minflt


def call_deeper(depth: int, function: Callable[[], Row]) -> Row:
    return call_deeper(depth - 1, function) if depth else function()


# This side


class Remote:
    """A process that is one engine."""

    def __init__(self, row: Row, cells: Cells, job: Row, slot: int, options: argparse.Namespace) -> None:
        self.row, self.cells = row, cells
        self._timeout = options.engine_timeout
        self._log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        self._answers: queue.Queue[str | None] = queue.Queue()
        paths = [options.vllm, str(HERE.parent / "src"), os.environ.get("PYTHONPATH")]
        # Engines that compile at the same time must not write into one another's files.
        caches = Path(os.environ.get("VLLM_CACHE_ROOT", "~/.cache/vllm")).expanduser() / f"together-{slot}"
        places = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "VLLM_CACHE_ROOT": str(caches)}
        environment = {**os.environ, **ENVIRONMENT, **places}
        environment.pop("DSDE_POLICY", None)
        # -P: what lies beside this file must not come first.
        command, pipe = [sys.executable, "-P", __file__, "--engine"], subprocess.PIPE
        self._process = subprocess.Popen(
            command, env=environment, stdin=pipe, stdout=pipe, stderr=self._log, text=True, start_new_session=True
        )
        threading.Thread(target=self._listen, daemon=True).start()
        self.send(job)

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(RESULT):
                self._answers.put(line.removeprefix(RESULT))
        self._answers.put(None)

    def send(self, request: Row) -> None:
        assert self._process.stdin is not None
        self._deadline = time.perf_counter() + self._timeout
        with contextlib.suppress(BrokenPipeError):  # `receive` will say so
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()

    def receive(self) -> Row | None:
        """The answer to what was sent last. None: it failed, and there will be no more."""
        try:
            line = self._answers.get(timeout=max(self._deadline - time.perf_counter(), 0))
            error = "the process ended"
        except queue.Empty:
            line, error = None, f"no answer within {self._timeout:.0f} s"
        if line is None:
            self.close()
            log = self._read_log()
            self.row |= {"error": error, "log": log[-60:]}
            print(f"{self.row['engine']} failed: {error}", *log[-15:], sep="\n  | ", flush=True)
            return None
        return dict(json.loads(line))

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self.row["warnings"] = [one for one in self._read_log() if "dsde:" in one]

    def _read_log(self) -> list[str]:
        self._log.seek(0)
        return [one.rstrip() for one in self._log if one.strip()]


class Bench:
    def __init__(self, options: argparse.Namespace, folder: str) -> None:
        self.options = options
        self.begun = time.perf_counter()
        self.report: Row = {"command": " ".join(sys.argv[1:]), "machines": [], "cells": [], "engines": []}
        if options.out and options.out.exists():
            self.report |= json.loads(options.out.read_text())
            if any("host_ms" not in found for row in self.report["cells"] for found in row["rounds"]):
                sys.exit(f"{options.out} is of an older version, which measured otherwise: choose another file")
        self.memory_used = gpu_memory_used()
        self._write_models(folder)

    def _write_models(self, folder: str) -> None:
        options = self.options
        if options.target:
            self.target, self.draft, self.vocab_size = options.target, options.draft, 0
            return
        from gpu import SHAPES

        # vLLM's attention for CPUs wants larger heads than gpu.py's smallest shape has.
        shapes = SHAPES | {"tiny": SHAPES["tiny"]._replace(hidden=128, head_dim=32)}
        paths = []
        for name in options.shapes:
            path = Path(folder) / name
            path.mkdir(exist_ok=True)
            (path / "config.json").write_text(json.dumps(shapes[name].hf_config()))
            paths.append(str(path))
        self.target, self.draft = paths
        self.vocab_size = shapes[options.shapes[0]].vocab

    def run(self) -> None:
        first = max((engine["group"] for engine in self.report["engines"]), default=0) + 1
        start_s = 0.0
        for number, names in enumerate(self._groups(), first):
            if time.perf_counter() - self.begun + start_s > self.options.time_limit:
                print(f"no time left for {', '.join(names)}", flush=True)
                continue
            start_s = self._run_group(number, names)
            for _ in range(120):  # memory may become free a little after its processes have ended
                if gpu_memory_used() <= self.memory_used + 1024:
                    break
                time.sleep(0.5)

    def _num_rounds(self, variant: str) -> int:
        """That count."""
        is_stock = variant.startswith(("static", "table"))
        return min(self.options.rounds, self.options.stock_rounds) if is_stock else self.options.rounds

    def _left(self, variant: str) -> list[int]:
        num_rounds = self._num_rounds(variant) * self.options.copies
        rows = [row for row in self.report["cells"] if len(row["rounds"]) >= num_rounds]
        known = {row["batch"] for row in rows if row["variant"] == variant}
        return [batch for batch in self.options.batches if batch not in known]

    def _groups(self) -> list[list[str]]:
        """Engines that run together: the plugin with those fixed lengths that it is to be compared with one by one."""
        variants = self.options.variants
        names = list(dict.fromkeys(engine_of(variant) for variant in variants if self._left(variant)))
        everywhere = ["off"] if "off" in variants and self.options.together > 2 else []
        others = [name for name in names if name not in ("table", *everywhere)]
        others.sort(key=lambda name: 0 if name == "plugin" else 1 if f"plugin:{name}" in variants else 2)
        room = self.options.together - len(everywhere)
        groups = [others[first : first + room] for first in range(0, len(others), room)]
        if "table" in names:
            # Beside others, if there will be fixed lengths by then to make it of.
            is_known = len(groups) > 1 or any(row["variant"].startswith("static") for row in self.report["cells"])
            if groups and is_known and len(groups[-1]) < room:
                groups[-1].append("table")
            else:
                groups.append(["table"])
        return [everywhere + group for group in groups or [[]] if names]

    def _run_group(self, number: int, names: list[str]) -> float:
        """Seconds until all were ready."""
        begin = time.perf_counter()
        cells = self._cells(number, names)
        remotes: list[Remote] = []
        try:
            for name in names:
                for _ in range(self.options.copies):
                    remotes.append(self._start(name, number, len(remotes), cells[name]))
            for remote in remotes:
                answer = remote.receive()
                if answer is not None:
                    remote.row["init_s"] = answer["init_s"]
                    self.report["machines"] = list(dict.fromkeys([*self.report["machines"], answer["machine"]]))
            self._save()
            start_s = time.perf_counter() - begin
            print(f"group {number}: {', '.join(names)}; started in {start_s:.0f} s", flush=True)
            self._take_turns(number, remotes)
        finally:
            for remote in remotes:
                remote.close()
            self._save()
        print(f"  {time.perf_counter() - begin:.0f} s in all", flush=True)
        return start_s

    def _cells(self, number: int, names: list[str]) -> dict[str, Cells]:
        """By engine."""
        cells: dict[str, Cells] = {name: {} for name in names}
        for variant in self.options.variants:
            if engine_of(variant) in cells and self._left(variant):
                cells[engine_of(variant)][variant] = self._left(variant)
        if "off" in cells:
            wanted = {batch for mine in cells.values() for left in mine.values() for batch in left}
            cells["off"][f"off@{number}"] = sorted(wanted - set(cells["off"].get("off", [])))
        return cells

    def _start(self, name: str, group: int, slot: int, cells: Cells) -> Remote:
        kind, _, length = name.partition(":")
        table = self._table() if kind == "table" else None
        lengths = {"off": 0, "plugin": self.options.max_length, "static": int(length or 0)}
        job: Row = {
            "options": self._options(max(1, *(row[2] for row in table)) if table else lengths[kind], table),
            "policy": next(iter(cells)).removeprefix("plugin:") if name == "plugin" else None,
            "vocab_size": self.vocab_size,
            "prompts": self.options.prompts,
        }
        if name == "plugin" and self.options.no_graphs:
            job["options"]["additional_config"] = {"dsde": {"graphs": False}}
        row: Row = {"engine": name, "group": group, "table": table}
        self.report["engines"].append(row)
        return Remote(row, cells, job, slot, self.options)

    def _take_turns(self, group: int, remotes: list[Remote]) -> None:
        """Every variant once in each round, and back in the next."""
        round_s = 0.0
        for batch in self.options.batches:
            turns = [(one, variant) for one in remotes for variant, left in one.cells.items() if batch in left]
            for number in range(min(1 - self.options.learn_rounds, 0), self.options.rounds + 1):
                begin = time.perf_counter()
                if begin - self.begun + round_s > self.options.time_limit:
                    print("  no time left for other rounds", flush=True)
                    return
                for remote, variant in turns[:: 1 if number % 2 else -1]:
                    learns = variant.startswith("plugin:")
                    if "error" in remote.row or (number < 0 and not learns) or number > self._num_rounds(variant):
                        continue
                    tokens = self.options.tokens.get(batch, 128)
                    if number <= 0 and not learns:
                        tokens = min(tokens, WARM_UP_TOKENS)
                    request = {"variant": variant, "batch": batch, "tokens": tokens, "number": number}
                    remote.send(request | {"depth": self.options.depth})
                    answer = remote.receive()
                    if answer is not None and number > 0:
                        self._add({"variant": variant, "batch": batch, "group": group}, answer)
                self._save()
                round_s = time.perf_counter() - begin
            self._show(batch, group)

    def _options(self, length: int, table: list[list[int]] | None) -> Row:
        options = self.options
        most = max(options.batches)
        found: Row = {
            "model": self.target,
            "max_model_len": 2048 if options.target or "tiny" not in options.shapes else 1536,
            "max_num_seqs": most,
            "max_num_batched_tokens": 8192,
            "enable_prefix_caching": False,
            # Where the size of the cache is given this is only what must be free at the start, whoever else is loading.
            "gpu_memory_utilization": 0.05,
        }
        found["kv_cache_memory_bytes"] = self._cache_bytes(length, found["max_model_len"])
        if not options.target:
            found |= {"load_format": "dummy", "skip_tokenizer_init": True}
        if options.eager:
            found |= {"enforce_eager": True, "dtype": "float32"}
        else:
            found["compilation_config"] = {"cudagraph_capture_sizes": capture_sizes(length, most)}
            # vLLM's default without a draft; with one up to 0.26.0 only if asked for.
            found["async_scheduling"] = True
        if length:
            speculation: Row = {"method": "draft_model", "model": self.draft, "num_speculative_tokens": length}
            if not options.target and not options.eager:  # on a CPU vLLM does not make acceptance up
                rates = [options.acceptance ** (depth + 1) for depth in range(length)]
                speculation |= {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": rates}
            if table is not None:
                speculation["num_speculative_tokens_per_batch_size"] = table
            found["speculative_config"] = speculation
        return found

    def _cache_bytes(self, length: int, least_tokens: int) -> int:
        """What the largest round needs, and 15 % more."""
        options = self.options
        block = 128 if options.eager else 16
        sums = [least_tokens]
        for batch in options.batches:
            more = options.tokens.get(batch, 128) + 2 * (length + 1)
            for number in range(options.rounds + 1):
                prompts = make_prompts(batch, number, options.prompts, self.vocab_size)
                # A token of English or code has more than three characters.
                sizes = [len(one["prompt"]) // 3 if options.target else PROMPT_TOKENS for one in prompts]
                sums.append(sum(-(-(size + more) // block) * block for size in sizes))
        models = [self.target, self.draft] if length else [self.target]
        token_bytes = sum(kv_values(Path(model)) for model in models) * (4 if options.eager else 2)
        return int(1.15 * max(sums) * token_bytes)

    def _table(self) -> list[list[int]]:
        """The fixed length that did best at every batch measured, each up to the next."""
        table, first = [], 1
        batches = sorted(self.options.batches)
        for batch, following in zip(batches, [*batches[1:], None], strict=True):
            rows = [row for row in self.report["cells"] if row["batch"] == batch]
            fixed = [row for row in rows if row["variant"].split(":")[0] in ("off", "static")]
            best = max(fixed, key=lambda row: float(row["tokens_per_s"]), default={"variant": "off"})["variant"]
            last = batch if following is None else (batch + following) // 2
            table.append([first, last, 0 if best == "off" else int(best.removeprefix("static:"))])
            first = last + 1
        return table

    def _add(self, cell: Row, found: Row) -> None:
        cells: list[Row] = self.report["cells"]
        row = next((row for row in cells if cell.items() <= row.items()), None)
        if row is None:
            # What another group left unfinished begins anew: rounds of a cell belong together.
            cells[:] = [row for row in cells if (row["variant"], row["batch"]) != (cell["variant"], cell["batch"])]
            row = {**cell, "rounds": []}
            cells.append(row)
        rounds = row["rounds"]
        rounds.append(found)
        steps = max(sum(one["steps"] for one in rounds), 1)
        row["tokens_per_s"] = max(map(speed_of, rounds))
        row["step_ms"] = 1000 * sum(one["seconds"] for one in rounds) / steps
        row["tokens_per_step"] = sum(one["tokens"] for one in rounds) / steps / row["batch"]

    def _save(self) -> None:
        if self.options.out:
            draft = self.options.out.with_suffix(".tmp")
            draft.write_text(json.dumps(self.report, indent=1))
            draft.replace(self.options.out)

    def _show(self, batch: int, group: int) -> None:
        for row in (row for row in self.report["cells"] if (row["batch"], row["group"]) == (batch, group)):
            speed, step = f"{row['tokens_per_s']:9.1f} tokens/s", f"{row['tokens_per_step']:.2f} tokens a step"
            one = row["rounds"][-1]
            if one.get("plugin_num_steps"):
                step += f", {100 * one['plugin_num_off_steps'] / one['plugin_num_steps']:.0f} % of steps without drafts"
            print(f"  {row['variant']:18} batch {batch:3}: {speed}, {row['step_ms']:.2f} ms, {step}", flush=True)

    def summary(self) -> list[str]:
        """Tokens/s of all variants at all batches, then what the plugin promises, as a table for the documentation."""
        cells = {(row["variant"], row["batch"]): row for row in self.report["cells"]}
        variants = list(dict.fromkeys(variant for variant, _ in cells))
        batches = sorted({batch for _, batch in cells})
        lines = [*self.report["machines"], "", f"{'tokens/s, batch':20}" + "".join(f"{batch:>12}" for batch in batches)]
        for variant in variants:
            speeds = [cells.get((variant, batch), {}).get("tokens_per_s") for batch in batches]
            lines.append(f"{variant:20}" + "".join(f"{f'{speed:.0f}' if speed else '-':>12}" for speed in speeds))
        lines += ["", f"| tokens/s, batch | {' | '.join(map(str, batches))} |", "| --- |" + " --- |" * len(batches)]
        fixed = [variant for variant in variants if variant.startswith("static:")]
        for variant in (variant for variant in variants if variant.startswith(("plugin:", "static:"))):
            policy = variant.removeprefix("plugin:")
            rivals = {"off": ["off"]}
            if policy != variant:
                rivals |= {"best static": fixed, "table": ["table"], f"stock {policy}": [policy]}
            for name, others in rivals.items():
                there = [[cells[one, batch] for one in others if (one, batch) in cells] for batch in batches]
                mine = [cells.get((variant, batch)) for batch in batches]
                compared = {name: ratio, f"{name}, mean of rounds": mean_ratio}
                compared[f"{name}, host as fast"] = alike_ratio
                if others == [policy]:
                    compared[f"{name}, seconds of a step"] = step_ratio
                for label, compare in compared.items():
                    ratios = [compare(one, rows) for one, rows in zip(mine, there, strict=True)]
                    if set(ratios) != {"-"}:
                        lines.append(f"| {variant} / {label} | {' | '.join(ratios)} |")
        if any("*" in line for line in lines):
            lines += ["", "\\* measured in different groups, not side by side"]
        return lines


def speed_of(found: Row) -> float:
    """Tokens/s of a round."""
    return float(found["tokens"] / max(found["seconds"], 1e-9))


def ratio(mine: Row | None, others: list[Row]) -> str:
    """To the best of them, with a star if that was not measured side by side."""
    if mine is None or not others:
        return "-"
    best = max(others, key=lambda row: float(row["tokens_per_s"]))
    return f"{mine['tokens_per_s'] / best['tokens_per_s']:.3f}" + ("" if mine["group"] == best["group"] else "*")


def mean_ratio(mine: Row | None, others: list[Row]) -> str:
    """To the best of them, round by round, with the 95 % interval of its mean: what the best of few rounds may hide."""
    if mine is None or not others:
        return "-"
    best = max(others, key=lambda row: float(row["tokens_per_s"]))
    numbers = {found["number"] for found in mine["rounds"]} & {found["number"] for found in best["rounds"]}
    speeds = [[speed_of(found) for found in row["rounds"] if found["number"] in numbers] for row in (best, mine)]
    if mine["group"] != best["group"] or len(speeds[0]) < 2 or len(speeds[0]) != len(speeds[1]):
        return "-"
    from intervals import half_width  # as `cores` above

    ratios = [ours / theirs for theirs, ours in zip(*speeds, strict=True)]
    return f"{sum(ratios) / len(ratios):.2f} ± {half_width(ratios):.2f}"


def alike_ratio(mine: Row | None, others: list[Row]) -> str:
    """To the best of them, in pairs of turns of one round between and during which the host was as fast, with the 95 %
    interval of the mean and the number of pairs."""
    if mine is None or not others:
        return "-"
    best = max(others, key=lambda row: float(row["tokens_per_s"]))
    from host_pace import is_alike
    from intervals import half_width

    ratios = [
        speed_of(ours) / speed_of(theirs)
        for ours, theirs in itertools.product(mine["rounds"], best["rounds"])
        if ours["number"] == theirs["number"] and is_alike(ours["host_ms"], theirs["host_ms"])
    ]
    if mine["group"] != best["group"] or len(ratios) < 2:
        return "-"
    return f"{sum(ratios) / len(ratios):.3f} ± {half_width(ratios):.3f} ({len(ratios)})"


def step_ratio(mine: Row | None, others: list[Row]) -> str:
    """Of the mean step, with the one other: how many steps there are depends on the unluckiest request."""
    if mine is None or not others or mine["group"] != others[0]["group"]:
        return "-"
    return f"{mine['step_ms'] / others[0]['step_ms']:.3f}"


def gpu_memory_used() -> int:
    """MiB, by anybody; 0 where there is no GPU."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        return sum(map(int, subprocess.check_output(command, text=True, timeout=30).split()))
    except (OSError, ValueError, subprocess.SubprocessError):
        return 0


def kv_values(model: Path) -> int:
    """Numbers that a model keeps of each token."""
    config = json.loads((model / "config.json").read_text())
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    return int(2 * config["num_hidden_layers"] * (config.get("num_key_value_heads") or heads) * head_dim)


def capture_sizes(length: int, most: int) -> list[int]:
    """Tokens to capture CUDA graphs for: of batches on the way, plain, with drafts, and when the draft reads those and
    one more; as vLLM does, up to 512."""
    batches = [size for size in (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256) if size <= most]
    lengths = (1, length + 1, length + 2) if length else (1,)
    return sorted({batch * each for batch in batches for each in lengths if batch * each <= 512} | {512})


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON; a cell that it holds is not measured again")
    parser.add_argument("--vllm", metavar="SITE", help="folder to import vLLM from, where it is not installed")
    parser.add_argument("--shapes", default="8b,1b", help="target and draft of made-up weights, as in gpu.py")
    parser.add_argument("--acceptance", type=float, default=0.8, help="of a drafted token, if those before it stood")
    parser.add_argument("--target", help="folder of a real target; then acceptance is real, too")
    parser.add_argument("--draft", help="folder of its draft")
    parser.add_argument("--batches", default="1,8,64,256")
    parser.add_argument("--tokens", default="", help=f"by batch, as in 1=384;256=96; default: {TOKENS}")
    parser.add_argument(
        "--variants",
        default="off;plugin:goodput;plugin:auto;plugin:static:2;plugin:static:3;static:2;static:3;static:1;static:4;table",
        help="between semicolons; fixed lengths that the plugin has, too, are measured beside it if there is room",
    )
    parser.add_argument("--max-length", type=int, default=4, help="num_speculative_tokens of the plugin's engine")
    parser.add_argument("--rounds", type=int, default=2, help="the best counts")
    parser.add_argument(
        "--stock-rounds", type=int, default=99, help="the most of vLLM's own lengths and table, which take their time"
    )
    parser.add_argument(
        "--learn-rounds", type=int, default=1, help="of the plugin's policies at every batch, before those that count"
    )
    parser.add_argument("--together", type=int, default=4, help="engines that share the GPU, and are measured in turns")
    parser.add_argument(
        "--copies",
        type=int,
        default=1,
        help="of every engine; rounds of all of them count, since processes that are alike differ as long as they live",
    )
    parser.add_argument("--depth", type=int, default=0, help="calls between the program and vLLM, beside its own")
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs, float32: for a CPU")
    parser.add_argument("--no-graphs", action="store_true", help="without the plugin's own CUDA graphs")
    parser.add_argument("--time-limit", type=float, default=540.0, help="seconds after which no round is started")
    parser.add_argument("--engine-timeout", type=float, default=300.0, help="seconds for a start, and for an answer")
    parser.add_argument("--engine", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.batches = [int(batch) for batch in options.batches.split(",")]
    options.shapes = options.shapes.split(",") if "," in options.shapes else [options.shapes] * 2
    options.variants = [variant.strip() for variant in options.variants.split(";") if variant.strip()]
    given = dict(pair.split("=") for pair in options.tokens.split(";") if pair)
    options.tokens = TOKENS | {int(batch): int(tokens) for batch, tokens in given.items()}
    if min(options.together, options.copies) < 1:
        parser.error("--together and --copies must be at least 1")
    if bool(options.target) != bool(options.draft):
        parser.error("--target and --draft belong together")
    options.prompts = read_prompts() if options.target else []
    return options


def read_prompts() -> list[str]:
    """Prompts of the built-in benchmark, for a pair that has something to say."""
    path = HERE.parent / "src" / "dsde" / "bench" / "prompts.jsonl"
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    texts = [row.get("prompt") or row["turns"][0] for row in rows]
    return [text for text in texts if len(text) < 2000]


def main() -> None:
    if "--engine" in sys.argv[1:]:
        serve()
        return
    options = parse_options()
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(options, folder)
        bench.run()
    print("\n" + "\n".join(bench.summary()))


if __name__ == "__main__":
    main()
