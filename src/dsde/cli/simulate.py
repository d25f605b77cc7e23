"""`dsde simulate`: policies on drawn or recorded requests, in virtual time. Imports no torch."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from dsde.core.errors import InvalidInput
from dsde.policies import make_policy, split_specs
from dsde.simulation import COSTS, Comparison, compare, make_costs, make_stream


@dataclass(frozen=True, slots=True)
class Setting:
    """The options of the command, as they were given. Defaults live here."""

    policies: str = "off,static:4,dsde"
    batch_size: str = "1,16"
    stream: str = "phases"
    cost: str = "memory-bound"
    requests: int = 64
    tokens: int = 256
    seed: int = 0


def run_simulate(setting: Setting, out: Path | None = None) -> None:
    specs = split_specs(setting.policies)
    for spec in specs:
        make_policy(spec)
    batch_sizes = [_batch_size(text) for text in setting.batch_size.split(",")]
    if setting.seed < 0:
        raise InvalidInput(f"seed must be at least 0, not {setting.seed}")
    costs = make_costs(setting.cost)
    requests = make_stream(setting.stream).draw(setting.requests, setting.tokens, setting.seed)
    for size in batch_sizes:
        if size is not None and size > requests.size:
            raise InvalidInput(f"a batch of {size} needs as many requests; there are {requests.size}, see --requests")
    if out is not None:
        _check_writable(out)
    console = Console()
    comparisons = []
    for size in batch_sizes:
        with console.status("simulating"):
            comparisons.append(compare(specs, requests, costs, size))
        console.print(_table(comparisons[-1], setting))
    if out is not None:
        report = {**asdict(setting), "costs": costs.to_dict(), "batches": [c.to_dict() for c in comparisons]}
        out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def _batch_size(text: str) -> int | None:
    if text.strip() == "all":
        return None
    try:
        size = int(text)
    except ValueError:
        size = 0
    if size < 1:
        raise InvalidInput(f"batch size must be a whole number of at least 1, or all, not {text.strip()!r}")
    return size


def _table(comparison: Comparison, setting: Setting) -> Table:
    batch = "all at once" if comparison.batch_size is None else f"batch {comparison.batch_size}"
    cost = setting.cost if setting.cost in COSTS else "given costs"
    title = f"{batch}: {setting.stream}, {cost}, virtual time; best static length: {comparison.best_static}"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 0, 0, 1))
    headings = ("policy", "tokens/s", "vs off", "vs static", "drafted", "wasted", "rate", "length")
    for heading in headings:
        is_name = heading == "policy"
        table.add_column(heading, justify="left" if is_name else "right", no_wrap=not is_name, overflow="fold")
    for row in comparison.rows:
        result = row.result
        table.add_row(
            row.policy,
            f"{result.tokens_per_s:.{1 if result.tokens_per_s >= 100 else 3}f}",
            f"{row.vs_off:.2f}x",
            f"{row.vs_static:.2f}x",
            str(result.num_drafted),
            str(result.num_wasted),
            "-" if result.acceptance_rate is None else f"{result.acceptance_rate:.0%}",
            f"{result.mean_length:.2f}",
        )
    return table


def _check_writable(path: Path) -> None:
    """Find out before the work, not after it."""
    try:
        path.open("a").close()
    except OSError as error:
        raise InvalidInput(f"The report cannot be written to {path}: {error.strerror}.") from None
