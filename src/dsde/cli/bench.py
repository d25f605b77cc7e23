"""`dsde bench`: policies side by side on real models, and a report of it. Goes on where it was interrupted."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table as RichTable

from dsde import __version__
from dsde.bench.bench import Bench, make_agenda, make_policy_contenders
from dsde.bench.contender import Contender
from dsde.bench.files import make_folder, write_files
from dsde.bench.machine import describe_machine, describe_models
from dsde.bench.peers import choose_peers, make_peers
from dsde.bench.presets import PRESETS
from dsde.bench.report import Report, answer, make_report
from dsde.bench.results import FILE_NAME, Results, load_results
from dsde.bench.setting import Setting
from dsde.bench.summary import is_static
from dsde.bench.table import Table
from dsde.bench.tables import label, overview, speed_table, work_table
from dsde.core.errors import DsdeError, InvalidInput
from dsde.engine.llm import LLM
from dsde.policies import make_policy, split_specs

QUICK: dict[str, Any] = {"num_requests": 6, "max_tokens": 48, "rounds": 3}
QUICK_POLICIES = ("off", "static:2", "static:4", "dsde", "auto")
_SMALL_CACHE = 64 << 20
"""for the engine that only reads prompts; contenders have their own"""


@dataclass(frozen=True, slots=True)
class Options:
    """What a person said on the command line; None: nothing."""

    policies: str | None = None
    workload: str | None = None
    batch_sizes: str | None = None
    temperature: str | None = None
    requests: int | None = None
    max_tokens: int | None = None
    rounds: int | None = None
    arrival: str | None = None
    seed: int | None = None
    preset: str | None = None
    quick: bool = False
    peers: str = "auto"
    target: str | None = None
    draft: str | None = None
    dtype: str = "auto"
    device: str = "auto"


def run_bench(options: Options, out: Path, fresh: bool, arguments: Sequence[str]) -> None:
    setting = make_setting(options)
    for spec in setting.policies:
        make_policy(spec)
    make_folder(out)
    console = Console()
    path = out / FILE_NAME
    known = load_results(path) if path.exists() and not fresh else None
    if known is not None:
        _check_same(known.setting, setting, out)
    if known is None or not known.finished:
        _measure(known, setting, path, console, shlex.join(["dsde", *arguments]))
    results = load_results(path)
    missing = write_files(results, out)
    report = make_report(results)
    show(report, console)
    for sentence in missing:
        console.print(sentence, style="yellow")
    console.print(f"{out / 'report.html'}", highlight=False, soft_wrap=True)
    if not report.verdict.good:
        raise DsdeError(report.verdict.sentence)


def make_setting(options: Options) -> Setting:
    if options.preset is not None and options.preset not in PRESETS:
        raise InvalidInput(f"preset must be one of {', '.join(PRESETS)}, not {options.preset!r}")
    preset = PRESETS.get(options.preset or "")
    base = Setting() if preset is None else preset.setting
    if options.quick:
        policies = base.policies if preset else QUICK_POLICIES
        base = replace(base, policies=policies, **QUICK)
    given: dict[str, Any] = {
        "policies": options.policies and tuple(split_specs(options.policies)),
        "workloads": options.workload and tuple(_items(options.workload)),
        "batch_sizes": options.batch_sizes and tuple(_numbers("batch sizes", options.batch_sizes, int)),
        "temperatures": options.temperature and tuple(_numbers("temperature", options.temperature, float)),
        "num_requests": options.requests,
        "max_tokens": options.max_tokens,
        "rounds": options.rounds,
        "arrival": options.arrival,
        "seed": options.seed,
        "preset": options.preset,
        "target": options.target,
        "draft": options.draft,
    }
    setting = replace(base, **{name: value for name, value in given.items() if value is not None})
    setting = replace(setting, dtype=options.dtype, device=options.device)
    if preset and preset.needs_static and not any(map(is_static, setting.policies)):
        raise InvalidInput(f"preset {options.preset} compares with static lengths, so policies must hold one")
    return replace(setting, peers=choose_peers(options.peers, setting))


def show(report: Report, console: Console) -> None:
    for summary in report.summaries:
        if len(report.summaries) <= 4:
            console.print(_rich(speed_table(summary)))
            console.print(_rich(work_table(summary)))
    if len(report.summaries) > 1:
        console.print(_rich(overview(report.summaries)))
    for table in report.tables:
        console.print(_rich(table))
    for summary in report.summaries:
        fastest, words = answer(summary)
        console.print(f"{label(summary.cell)}: [bold]{fastest.contender}[/] {words}", highlight=False, soft_wrap=True)
    style = "bold green" if report.verdict.good else "bold red"
    console.print(report.verdict.sentence, style=style, highlight=False, soft_wrap=True)
    for sentence in report.results.notes:
        console.print(sentence, style="dim", highlight=False, soft_wrap=True)


def _measure(known: Results | None, setting: Setting, path: Path, console: Console, command: str) -> None:
    with console.status("loading the models"):
        llm = LLM(
            setting.target,
            setting.draft,
            "off",
            dtype=setting.dtype,
            device=setting.device,
            max_num_seqs=1,
            kv_cache_bytes=_SMALL_CACHE,
        )
        machine, models = describe_machine(llm), describe_models(llm)
        now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
        results = known or Results(setting, command, machine, models, __version__, now)
        if (results.machine, results.models) != (machine, models):
            raise InvalidInput(f"{path} was measured on another machine or with other models: choose another --out")
        agenda = make_agenda(results, llm)
        contenders: list[Contender] = make_policy_contenders(results, llm, agenda.longest)
        contenders += make_peers(results, llm, agenda.longest)
    try:
        with _Bar(console) as bar:
            Bench(results, agenda, contenders, path, bar).run()
    except KeyboardInterrupt:
        if path.exists():
            write_files(load_results(path), path.parent)
            said = f"Interrupted. What is done is in {path.parent}; the same command goes on from there."
            console.print(said, highlight=False, soft_wrap=True)
        raise
    finally:
        for contender in contenders:
            contender.close()


class _Bar:
    """A `Watcher` that draws a bar, requests being its unit."""

    def __init__(self, console: Console) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn())
        self._progress = Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console)
        self._task = self._progress.add_task("", total=None)

    def __enter__(self) -> _Bar:
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()

    def begin(self, num_requests: int) -> None:
        self._progress.update(self._task, total=num_requests)

    def describe(self, doing: str) -> None:
        self._progress.update(self._task, description=doing)

    def advance(self) -> None:
        self._progress.advance(self._task)


def _check_same(known: Setting, wanted: Setting, out: Path) -> None:
    names = [field.name for field in fields(Setting) if getattr(known, field.name) != getattr(wanted, field.name)]
    if names:
        others = ", ".join(name.replace("_", " ") for name in names)
        raise InvalidInput(
            f"{out} holds results of another command (it differs in {others}): choose another --out, or --fresh to "
            "measure anew"
        )


def _rich(table: Table) -> RichTable:
    drawn = RichTable(
        title=table.title,
        caption=table.note or None,
        title_justify="left",
        caption_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 0, 0, 1),
    )
    for number, heading in enumerate(table.headings):
        drawn.add_column(heading, justify="left" if number == 0 else "right", overflow="fold")
    for number, row in enumerate(table.rows):
        drawn.add_row(*row, style="bold" if number in table.marked else None)
    return drawn


def _items(text: str) -> list[str]:
    return list(dict.fromkeys(item.strip() for item in text.split(",") if item.strip()))


def _numbers(name: str, text: str, convert: type[int] | type[float]) -> list[int] | list[float]:
    try:
        return [convert(item) for item in _items(text)]
    except ValueError:
        raise InvalidInput(f"{name} must be numbers between commas, not {text!r}") from None
