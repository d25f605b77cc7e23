"""The vLLM plugin on a GPU: against vLLM without speculation, with fixed lengths, and with its table by batch size.

    python benchmarks/vllm_plugin.py --out plugin.json [--vllm SITE]           # made-up weights and acceptance
    python benchmarks/vllm_plugin.py --target FOLDER --draft FOLDER --out pair.json    # a real pair

Decoding speed is the difference between a long and a short generation, so that start-up and prefill cancel; a long one
that nobody measures comes first, and the best of the rounds counts. Every engine of vLLM is one process that does all
batches; policies of the plugin share one, since they can be changed while it runs. vLLM's table is made of what its
fixed lengths measured: the best of them for every batch.

Everything measured is in `--out` after every cell, and a second run with the same file goes on where the first stopped.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

RESULT = "RESULT "
HERE = Path(__file__).resolve().parent
SHORT_TOKENS = 8
TOKENS = {1: 1024, 8: 512, 64: 192, 256: 128}
"""that each request generates in the long run beyond the short one, by batch"""
ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
}
Row = dict[str, Any]


# The other side: a process that has imported vLLM, and becomes an engine as often as it is asked to


def report(**event: Any) -> None:
    print(RESULT + json.dumps(event), flush=True)


def host() -> None:
    """An engine for every line of input, each in a process of its own that need not import vLLM again."""
    import vllm

    report(event="imported", version=vllm.__version__)
    for line in sys.stdin:
        job = json.loads(line)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                os.dup2(os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
                Engine(job).run()
                status = 0
            except BaseException:
                import traceback

                traceback.print_exc()
            sys.stdout.flush()
            os._exit(status)
        _, status = os.waitpid(child, 0)
        report(event="end", status=os.waitstatus_to_exitcode(status))


class Engine:
    """One engine of vLLM, and what is measured with it."""

    def __init__(self, job: Row) -> None:
        self.job = job
        self.num_steps = 0
        start = time.perf_counter()
        if job["policies"]:
            from dsde.integrations.vllm.plugin import register

            # The environment and not `additional_config`, which is part of the key of vLLM's compile cache.
            os.environ["DSDE_POLICY"] = job["policies"][0]
            register()
        import vllm

        self.vllm = vllm
        self.llm = vllm.LLM(**job["options"])
        report(event="ready", init_s=time.perf_counter() - start)
        step = self.llm.llm_engine.step

        def counted_step() -> Any:
            self.num_steps += 1
            return step()

        self.llm.llm_engine.step = counted_step

    def run(self) -> None:
        for variant in [f"plugin:{policy}" for policy in self.job["policies"]] or [self.job["name"]]:
            if variant not in self.job["cells"]:
                continue
            if variant.startswith("plugin:"):
                self._obey(variant.removeprefix("plugin:"))
            for batch, tokens in self.job["cells"][variant]:
                self._measure(variant, batch, tokens)

    def _obey(self, policy: str) -> None:
        """From now on, with nothing learnt."""
        from dsde.integrations.vllm import running, scheduling
        from dsde.integrations.vllm.settings import Settings

        os.environ["DSDE_POLICY"] = policy
        core = self.llm.llm_engine.engine_core.engine_core
        self.controller = scheduling.steer(core.scheduler, Settings(policy=policy))
        runner = core.model_executor.driver_worker.worker.model_runner
        if hasattr(runner, running.ADAPTER):
            delattr(runner, running.ADAPTER)

    def _measure(self, variant: str, batch: int, tokens: int) -> None:
        self._generate(batch, tokens + SHORT_TOKENS, 0)
        for number in range(1, self.job["rounds"] + 1):
            before = self._counts()
            long = self._generate(batch, tokens + SHORT_TOKENS, number)
            after = self._counts()
            short = self._generate(batch, SHORT_TOKENS, number)
            seconds, steps = long[0] - short[0], long[1] - short[1]
            found = {name: after[name] - before[name] for name in after}
            report(event="round", variant=variant, batch=batch, tokens=tokens, seconds=seconds, steps=steps, **found)

    def _generate(self, batch: int, tokens: int, number: int) -> tuple[float, int]:
        rng = random.Random(f"{batch} {number} {tokens}")
        texts = self.job["prompts"]
        if texts:
            prompts = [{"prompt": texts[rng.randrange(len(texts))]} for _ in range(batch)]
        else:
            most = min(self.job["vocab_size"], 100_000)
            prompts = [{"prompt_token_ids": [rng.randrange(10, most) for _ in range(128)]} for _ in range(batch)]
        params = self.vllm.SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        steps, begin = self.num_steps, time.perf_counter()
        self.llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - begin, self.num_steps - steps

    def _counts(self) -> dict[str, float]:
        """What the plugin did so far."""
        if not hasattr(self, "controller"):
            return {}
        names = ("num_steps", "num_off_steps", "num_draft_tokens", "num_accepted_tokens", "num_catch_up_tokens")
        return {f"plugin_{name}": self.controller.meter[name] for name in names}


# This side


class Host:
    def __init__(self, site: str | None, timeout: float) -> None:
        self.timeout = timeout
        paths = [site, str(HERE.parent / "src"), os.environ.get("PYTHONPATH")]
        environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        self._log = tempfile.NamedTemporaryFile("r", suffix=".log", errors="replace")  # noqa: SIM115
        # -P: what lies beside this file must not hide modules of vLLM.
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__, "--host"],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=open(self._log.name, "w"),  # noqa: SIM115
            text=True,
            start_new_session=True,
        )

    def events(self, job: Row) -> Iterator[Row]:
        """Of one engine; the last one is `end`, with an error if there was one."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        late = threading.Event()

        def stop() -> None:
            late.set()
            os.killpg(self._process.pid, signal.SIGKILL)

        timer = threading.Timer(self.timeout, stop)
        timer.start()
        try:
            self._process.stdin.write(json.dumps({**job, "log": self._log.name}) + "\n")
            self._process.stdin.flush()
            for line in self._process.stdout:
                if not line.startswith(RESULT):
                    continue
                event = json.loads(line.removeprefix(RESULT))
                if event["event"] == "end":
                    yield {"event": "end"} if event["status"] == 0 else self._failed(f"status {event['status']}")
                    return
                yield event
        except BrokenPipeError:
            pass
        finally:
            timer.cancel()
        yield self._failed(f"stopped after {self.timeout:.0f} s" if late.is_set() else "the process ended")

    def _failed(self, why: str) -> Row:
        lines = [
            line.rstrip() for line in Path(self._log.name).read_text(errors="replace").splitlines() if line.strip()
        ]
        return {"event": "end", "error": f"{why}: {lines[-1] if lines else 'no message'}", "log": lines[-60:]}

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        if self.is_alive:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


class Bench:
    def __init__(self, options: argparse.Namespace, folder: str) -> None:
        self.options = options
        self.begun = time.perf_counter()
        self.report: Row = {"command": " ".join(sys.argv[1:]), "cells": [], "engines": []}
        if options.out and options.out.exists():
            self.report |= json.loads(options.out.read_text())
        self.host: Host | None = None
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
        variants = self.options.variants
        plugins = [variant for variant in variants if variant.startswith("plugin:")]
        engines = list(dict.fromkeys("plugin" if variant in plugins else variant for variant in variants))
        for name in engines:
            mine = plugins if name == "plugin" else [name]
            cells = {variant: self._left(variant) for variant in mine}
            cells = {variant: left for variant, left in cells.items() if left}
            if not cells:
                continue
            if time.perf_counter() - self.begun > self.options.time_limit:
                print(f"no time left for {name}", flush=True)
                continue
            self._run_engine(name, cells)
        if self.host is not None:
            self.host.close()

    def _left(self, variant: str) -> list[tuple[int, int]]:
        known = {
            (row["variant"], row["batch"]) for row in self.report["cells"] if len(row["rounds"]) >= self.options.rounds
        }
        tokens = {batch: self.options.tokens.get(batch, 128) for batch in self.options.batches}
        return [(batch, tokens[batch]) for batch in self.options.batches if (variant, batch) not in known]

    def _run_engine(self, name: str, cells: dict[str, list[tuple[int, int]]]) -> None:
        length = 0 if name == "off" else self.options.max_length
        table = None
        if name.startswith("static:"):
            length = int(name.removeprefix("static:"))
        if name == "table":
            table = self._table()
            length = max(max(row[2] for row in table), 1)
        job: Row = {
            "name": name,
            "options": self._options(length, table),
            "policies": [variant.removeprefix("plugin:") for variant in cells] if name == "plugin" else [],
            "cells": cells,
            "rounds": self.options.rounds,
            "vocab_size": self.vocab_size,
            "prompts": self.options.prompts,
        }
        if name == "plugin" and self.options.no_graphs:
            job["options"]["additional_config"] = {"dsde": {"graphs": False}}
        engine: Row = {"engine": name, "table": table}
        self.report["engines"].append(engine)
        begin = time.perf_counter()
        if self.host is None or not self.host.is_alive:
            self.host = Host(self.options.vllm, self.options.engine_timeout)
        for event in self.host.events(job):
            kind = event.pop("event")
            if kind == "round":
                self._add(event)
            else:
                engine.update(event)
            self._save()
        engine["seconds"] = time.perf_counter() - begin
        self._save()
        print(f"{name}: ready after {engine.get('init_s', 0):.0f} s, {engine['seconds']:.0f} s in all", flush=True)
        if "error" in engine:
            print(f"  failed: {engine['error']}", flush=True)
        print("\n".join(self._lines(set(cells))), flush=True)

    def _options(self, length: int, table: list[list[int]] | None) -> Row:
        options = self.options
        most = max(options.batches)
        found: Row = {
            "model": self.target,
            "max_model_len": 2048 if options.target or "tiny" not in options.shapes else 1536,
            "max_num_seqs": most,
            "max_num_batched_tokens": 8192,
            "enable_prefix_caching": False,
            "gpu_memory_utilization": options.memory,
        }
        if not options.target:
            found |= {"load_format": "dummy", "skip_tokenizer_init": True}
        if options.eager:
            found |= {"enforce_eager": True, "dtype": "float32"}
        else:
            found["compilation_config"] = {"cudagraph_capture_sizes": capture_sizes(length, most)}
        if length:
            speculation: Row = {"method": "draft_model", "model": self.draft, "num_speculative_tokens": length}
            if not options.target and not options.eager:  # on a CPU vLLM does not make acceptance up
                rates = [options.acceptance ** (depth + 1) for depth in range(length)]
                speculation |= {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": rates}
            if table is not None:
                speculation["num_speculative_tokens_per_batch_size"] = table
            found["speculative_config"] = speculation
        return found

    def _table(self) -> list[list[int]]:
        """The fixed length that did best at every batch measured, each up to the next."""
        rows, first = [], 1
        batches = sorted(self.options.batches)
        for batch, following in zip(batches, [*batches[1:], None], strict=True):
            fixed = [
                row for row in self._rows(batch) if row["variant"] == "off" or row["variant"].startswith("static:")
            ]
            best = max(fixed, key=lambda row: float(row["tokens_per_s"]), default={"variant": "off"})["variant"]
            last = batch if following is None else (batch + following) // 2
            rows.append([first, last, 0 if best == "off" else int(best.removeprefix("static:"))])
            first = last + 1
        return rows

    def _add(self, event: Row) -> None:
        cells = self.report["cells"]
        row = next((row for row in cells if (row["variant"], row["batch"]) == (event["variant"], event["batch"])), None)
        if row is None:
            row = {"variant": event["variant"], "batch": event["batch"], "tokens": event["tokens"], "rounds": []}
            cells.append(row)
        row["rounds"].append(event)
        rounds = row["rounds"]
        row["tokens_per_s"] = max(row["batch"] * one["tokens"] / one["seconds"] for one in rounds)
        row["step_ms"] = 1000 * sum(one["seconds"] for one in rounds) / max(sum(one["steps"] for one in rounds), 1)
        row["tokens_per_step"] = sum(one["tokens"] for one in rounds) / max(sum(one["steps"] for one in rounds), 1)

    def _save(self) -> None:
        if self.options.out:
            draft = self.options.out.with_suffix(".tmp")
            draft.write_text(json.dumps(self.report, indent=1))
            draft.replace(self.options.out)

    def _rows(self, batch: int) -> list[Row]:
        return [row for row in self.report["cells"] if row["batch"] == batch]

    def _lines(self, variants: set[str]) -> list[str]:
        lines = []
        for row in self.report["cells"]:
            if row["variant"] in variants:
                one = row["rounds"][-1]
                share = ""
                if one.get("plugin_num_steps"):
                    off = one["plugin_num_off_steps"] / one["plugin_num_steps"]
                    share = f", {100 * off:.0f} % of steps without drafts, {one['plugin_num_draft_tokens']:.0f} drafted"
                lines.append(
                    f"  {row['variant']:18} batch {row['batch']:3}: {row['tokens_per_s']:9.1f} tokens/s, "
                    f"{row['step_ms']:.2f} ms a step, {row['tokens_per_step']:.2f} tokens a step{share}"
                )
        return lines

    def summary(self) -> list[str]:
        """Tokens/s of all variants at all batches, then what the plugin promises."""
        variants = list(dict.fromkeys(row["variant"] for row in self.report["cells"]))
        batches = sorted({row["batch"] for row in self.report["cells"]})
        speeds = {(row["variant"], row["batch"]): float(row["tokens_per_s"]) for row in self.report["cells"]}
        lines = [f"{'tokens/s, batch':20}" + "".join(f"{batch:>12}" for batch in batches)]
        for variant in variants:
            cells = [speeds.get((variant, batch)) for batch in batches]
            lines.append(f"{variant:20}" + "".join(f"{'-' if cell is None else f'{cell:.0f}':>12}" for cell in cells))
        lines.append("")
        fixed = [variant for variant in variants if variant.startswith("static:")]
        for variant in variants:
            if not variant.startswith("plugin:"):
                continue
            policy = variant.removeprefix("plugin:")
            rivals = {"off": ["off"], "best static": fixed, "table": ["table"], f"stock {policy}": [policy]}
            for name, others in rivals.items():
                ratios = []
                for batch in batches:
                    best = max((speeds[other, batch] for other in others if (other, batch) in speeds), default=None)
                    mine = speeds.get((variant, batch))
                    ratios.append("-" if best is None or mine is None else f"{mine / best:.3f}")
                if any(ratio != "-" for ratio in ratios):
                    lines.append(f"{variant + ' / ' + name:34}" + "".join(f"{ratio:>9}" for ratio in ratios))
        return lines


def capture_sizes(length: int, most: int) -> list[int]:
    """Tokens to capture CUDA graphs for: of batches on the way, plain and with drafts; as vLLM does, up to 512."""
    batches = [size for size in (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256) if size <= most]
    return sorted({size for batch in batches for size in (batch, batch * (length + 1)) if size <= 512})


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, help="JSON, rewritten after every cell; what it holds is not measured again"
    )
    parser.add_argument("--vllm", metavar="SITE", help="folder to import vLLM from, where it is not installed")
    parser.add_argument("--shapes", default="8b,1b", help="target and draft of made-up weights, as in gpu.py")
    parser.add_argument("--acceptance", type=float, default=0.8, help="of a drafted token, if those before it stood")
    parser.add_argument("--target", help="folder of a real target; then acceptance is real, too")
    parser.add_argument("--draft", help="folder of its draft")
    parser.add_argument("--batches", default="1,8,64,256")
    parser.add_argument("--tokens", default="", help=f"by batch, as in 1=1024;256=128; default: {TOKENS}")
    parser.add_argument(
        "--variants",
        default="off;plugin:goodput;plugin:auto;plugin:static:1;plugin:static:2;plugin:static:3;plugin:static:4;"
        "static:1;static:2;static:3;static:4;table",
        help="between semicolons, in the order in which they are measured",
    )
    parser.add_argument("--max-length", type=int, default=4, help="num_speculative_tokens of the plugin's engine")
    parser.add_argument("--rounds", type=int, default=2, help="the best counts")
    parser.add_argument("--memory", type=float, default=0.6, help="gpu_memory_utilization")
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs, float32: for a CPU")
    parser.add_argument("--no-graphs", action="store_true", help="without the plugin's own CUDA graphs")
    parser.add_argument("--time-limit", type=float, default=420.0, help="seconds after which no engine is started")
    parser.add_argument("--engine-timeout", type=float, default=300.0, help="seconds for one engine")
    parser.add_argument("--host", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.batches = [int(batch) for batch in options.batches.split(",")]
    options.shapes = options.shapes.split(",") if "," in options.shapes else [options.shapes] * 2
    options.variants = [variant.strip() for variant in options.variants.split(";") if variant.strip()]
    given = dict(pair.split("=") for pair in options.tokens.split(";") if pair)
    options.tokens = TOKENS | {int(batch): int(tokens) for batch, tokens in given.items()}
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
    if "--host" in sys.argv[1:]:
        host()
        return
    options = parse_options()
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(options, folder)
        bench.run()
    print("\n" + "\n".join(bench.summary()))


if __name__ == "__main__":
    main()
