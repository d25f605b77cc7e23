"""`dsde demo`: the same prompts without speculation, with a fixed length, with DSDE and with auto, step by step."""

from __future__ import annotations

import time
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from dsde.core.errors import DsdeError
from dsde.core.outputs import RequestOutput, StepRecord, StreamChunk
from dsde.core.params import SamplingParams
from dsde.engine.llm import LLM

PROMPTS = [
    "List the planets of the solar system, from the sun outwards.",
    "What is 17 plus 25? Explain each step.",
    "Write a Python function that tells whether a number is even.",
    "Translate into French: Good morning, how are you today?",
    "Explain in two sentences why the sky is blue.",
    "Write a short poem about the sea.",
    "Give me a simple recipe for pancakes.",
    "Repeat this sentence three times: The quick brown fox jumps over the lazy dog.",
]
MODES = ["off", "static:3", "dsde", "auto"]
_NUM_STEPS_SHOWN = 16


@dataclass(slots=True)
class ModeResult:
    policy: str
    outputs: list[RequestOutput]
    seconds: float

    @property
    def texts(self) -> list[str]:
        return [output.outputs[0].text for output in self.outputs]

    def total(self, name: str) -> int:
        return sum(getattr(output.metrics, name) for output in self.outputs)


def run_demo(max_tokens: int, num_prompts: int, batch_size: int) -> None:
    console = Console()
    with console.status("loading the embedded models"):
        # Every mode has a cache of its own, so none may take all the memory there is.
        llm = LLM(policy="off", max_num_seqs=batch_size, kv_cache_bytes=1 << 30)
    console.print(
        f"[bold]target[/] {llm.target}, 30 layers   [bold]draft[/] 4 layers trained for it\n", highlight=False
    )
    prompts = [llm.chat_prompt([{"role": "user", "content": text}]) for text in PROMPTS[:num_prompts]]
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    results = [_run_mode(llm.with_policy(policy), policy, prompts, params, console) for policy in MODES]
    example = results[-1].outputs[0]
    console.print(f"\n[bold]{PROMPTS[0]}[/]\n{example.outputs[0].text}\n", highlight=False)
    console.print(_steps_table(results[-1].policy, example.metrics.trace or []))
    console.print()
    console.print(_modes_table(results))
    if any(result.texts != results[0].texts for result in results):
        raise DsdeError("The texts differ between the modes, which must never happen: please report it.")
    console.print(f"All {len(prompts)} texts are identical in all {len(MODES)} modes.", style="bold green")


def _run_mode(llm: LLM, policy: str, prompts: list[list[int]], params: SamplingParams, console: Console) -> ModeResult:
    columns = (TextColumn("{task.description:9}"), BarColumn(), MofNCompleteColumn(), TextColumn("tokens"))
    outputs: dict[str, RequestOutput] = {}
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        task = progress.add_task(policy, total=len(prompts) * (params.max_tokens or 0))
        start = time.perf_counter()
        for event in llm.stream(prompts, params, trace=True):
            if isinstance(event, StreamChunk):
                progress.advance(task, len(event.token_ids))
            else:
                outputs[event.request_id] = event
        seconds = time.perf_counter() - start
        emitted = sum(output.metrics.num_emitted_tokens for output in outputs.values())
        progress.update(task, total=emitted)
    in_order = [output for _, output in sorted(outputs.items(), key=lambda item: int(item[0].rpartition("-")[2]))]
    return ModeResult(policy, in_order, seconds)


def _modes_table(results: list[ModeResult]) -> Table:
    table = Table(
        title="what it took (steps: target passes; rate: accepted of drafted)",
        title_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 0, 0, 1),
    )
    for heading in ("policy", "tokens", "steps", "per step", "drafted", "accepted", "rate", "tokens/s", "vs off"):
        table.add_column(heading, justify="left" if heading == "policy" else "right", no_wrap=True)
    baseline = results[0].total("num_emitted_tokens") / results[0].seconds
    for result in results:
        emitted, steps = result.total("num_emitted_tokens"), result.total("num_steps")
        drafted, accepted = result.total("num_draft_tokens"), result.total("num_accepted_tokens")
        speed = emitted / result.seconds
        table.add_row(
            result.policy,
            str(emitted),
            str(steps),
            f"{emitted / steps:.2f}",
            str(drafted),
            str(accepted),
            f"{accepted / drafted:.0%}" if drafted else "-",
            f"{speed:.1f}",
            f"{speed / baseline:.2f}x",
        )
    return table


def _steps_table(policy: str, trace: list[StepRecord]) -> Table:
    title = f"{policy}, first prompt: the first {_NUM_STEPS_SHOWN} of {len(trace)} steps"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 0, 0, 1))
    for heading in ("step", "outlook", "last", "next", "price", "wanted", "drafted", "accepted", "ms"):
        table.add_column(heading, justify="right", no_wrap=True)
    for record in trace[:_NUM_STEPS_SHOWN]:
        signals = record.signals
        price = (signals.get("cost_of_token") or 0.0) + (signals.get("cost_of_pass") or 0.0)
        table.add_row(
            str(record.step),
            _number(signals.get("outlook")),
            _number(signals.get("gain_of_last")),
            _number(signals.get("gain_of_next")),
            _number(price),
            "-" if record.predicted is None else f"{record.predicted:.0f}",
            str(record.drafted),
            str(record.accepted),
            f"{1000 * record.step_s:.0f}",
        )
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}" if value < 100 else f"{value:.0e}"
