"""`dsde trace`: one request, every token in the colour of where it came from, and what each step knew."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dsde.bench import drawing, plots
from dsde.bench.contender import Task
from dsde.bench.passages import UNKNOWN, Origin, is_complete, passages
from dsde.bench.recorder import trace_task
from dsde.bench.results import Trace
from dsde.bench.trace_plot import draw_trace
from dsde.cli.generate import ModelChoice
from dsde.core.errors import InvalidInput
from dsde.core.params import SamplingParams

STYLES = {Origin.ACCEPTED: "green", Origin.REJECTED: "red strike", Origin.OWN: "bold cyan"}
BARS = "▁▂▃▄▅▆▇█"


def run_trace(
    prompt: str, choice: ModelChoice, params: SamplingParams, *, raw: bool, steps: bool, out: Path | None
) -> None:
    if not prompt.strip():
        raise InvalidInput("The prompt is empty.")
    if out is not None:
        _check_picture(out)
    console = Console()
    with console.status("generating"):
        trace = _trace(prompt, choice, params, raw)
    console.print(_legend(), "", _text(trace), "", sep="\n", highlight=False)
    console.print(_strips(trace, console.width))
    if steps:
        console.print(_table(trace))
    if not is_complete(trace):
        console.print(f"{UNKNOWN}: a rejected token; on this device drafts never leave it.", style="dim")
    console.print(_summary(trace), style="dim", highlight=False, soft_wrap=True)
    if out is not None:
        figure = draw_trace(trace)
        if out.suffix == ".svg":
            out.write_text(drawing.to_svg(figure, text_as_paths=True), encoding="utf-8")
        else:
            out.write_bytes(drawing.to_png(figure))
        console.print(str(out), highlight=False, soft_wrap=True)


def _trace(prompt: str, choice: ModelChoice, params: SamplingParams, raw: bool) -> Trace:
    llm = choice.load(max_num_seqs=1)
    if llm.tokenizer is None:
        raise InvalidInput("This model has no tokenizer, so there is no text to show.")
    chats = not raw and llm.tokenizer.can_chat
    tokens = llm.chat_prompt([{"role": "user", "content": prompt}]) if chats else llm.tokenizer.encode(prompt)
    return trace_task(choice.policy, llm, Task("prompt", prompt, tokens, params), "prompt")


def _check_picture(out: Path) -> None:
    """Find out before the work, not after it."""
    if out.suffix not in (".svg", ".png"):
        raise InvalidInput(f"a picture is .svg or .png, not {out.name!r}")
    drawing.require_matplotlib()
    try:
        out.open("a").close()
    except OSError as error:
        raise InvalidInput(f"The picture cannot be written to {out}: {error.strerror}.") from None


def _legend() -> Text:
    return Text("   ").join(Text(f" {origin.value} ", STYLES[origin]) for origin in Origin)


def _text(trace: Trace) -> Text:
    text = Text()
    for part in passages(trace):
        for piece in part:
            # What was thrown away must not break the line of what was kept.
            shown = piece.on_one_line if piece.origin is Origin.REJECTED else piece.as_written
            text.append(shown, STYLES[piece.origin])
    return text


def _strips(trace: Trace, width: int) -> Table:
    """One letter a step: how high it stands."""
    steps = trace.steps
    rows: list[tuple[str, list[float | None]]] = [
        ("drafted", [step["drafted"] for step in steps]),
        ("accepted", [step["accepted"] for step in steps]),
        *plots.signal_panels(trace),
    ]
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), show_header=False)
    for _ in range(3):
        table.add_column(no_wrap=True)
    room = max(width - 24, 10)
    for first in range(0, len(steps), room):
        for name, values in rows:
            known = [value for value in values if value is not None]
            if known:
                strip = _strip(values[first : first + room], max(known), logarithmic=name == "SF")
                table.add_row(name, strip, f"to {max(known):.3g}")
        table.add_row("", "", "")
    return table


def _strip(values: Sequence[float | None], largest: float, logarithmic: bool) -> str:
    def height(value: float) -> float:
        return math.log1p(max(value, 0.0)) if logarithmic else max(value, 0.0)

    top = height(largest) or 1.0
    return "".join(
        " " if value is None else BARS[min(int(height(value) / top * len(BARS)), len(BARS) - 1)] for value in values
    )


def _table(trace: Trace) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 0, 0, 1))
    panels = plots.signal_panels(trace)
    headings = ["step", "wanted", "cap", "drafted", "accepted", *(name for name, _ in panels), "ms"]
    for heading in headings:
        table.add_column(heading, justify="right")
    table.add_column("text", overflow="fold")
    for number, (step, part) in enumerate(zip(trace.steps, passages(trace)[1:], strict=True)):
        line = Text()
        for piece in part:
            line.append(piece.on_one_line, STYLES[piece.origin])
        table.add_row(
            str(step["step"]),
            _number(step["predicted"]),
            _number(step["cap"]),
            str(step["drafted"]),
            str(step["accepted"]),
            *(_number(values[number]) for _, values in panels),
            f"{1000 * step['step_s']:.0f}",
            line,
        )
    return table


def _summary(trace: Trace) -> str:
    drafted, accepted = (sum(step[name] for step in trace.steps) for name in ("drafted", "accepted"))
    rate = f" ({accepted / drafted:.0%})" if drafted else ""
    return (
        f"{len(trace.pieces)} tokens in {len(trace.steps) + 1} target passes; {accepted} of {drafted} drafted tokens "
        f"accepted{rate}; policy {trace.contender}"
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}" if value < 100 else f"{value:.0e}"
