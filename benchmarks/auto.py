"""`auto` against fixed lengths, the literature and an oracle, in virtual time.

    python benchmarks/auto.py pair     # the recorded agreement of a real pair, by category
    python benchmarks/auto.py grid     # acceptance rates and mixtures of them, at every batch size
    python benchmarks/auto.py ablation # auto without its parts, on both
    python benchmarks/auto.py shift    # the recorded categories one after the other, a few short answers of each
    python benchmarks/auto.py turn     # all requests end, and others come: easier, harder, or as these were
    python benchmarks/auto.py looks    # what a position's signals and its sequence's history tell of agreement

Policies are warm: each has served other requests of the kind before (`--cold`: none has). Every policy meets the same
requests. Intervals are 95 % over seeds. Costs come from a table measured on a machine (`--costs FILE`), or are a preset
of `dsde simulate`; `--noise` and `--drift` make the machine an unsteady one. A lead, not a proof: what a draft would
have said behind its own mistake was not recorded.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from auto_ablation import ABLATIONS
from auto_looks import log_losses
from dsde.core.errors import InvalidInput
from dsde.policies import Policy, make_policy
from dsde.simulation import COSTS, Costs, MeasuredCosts, Requests, make_costs, make_stream, simulate
from dsde.simulation.traces import Recorded
from intervals import half_width
from oracle import Clairvoyant, Follower, Oracle
from unsteady import Unsteady

FOLDER = Path(__file__).parent
TRACE = FOLDER / "traces" / "qwen2.5_coder_1.5b_0.5b.json"
STATIC = [f"static:{length}" for length in range(1, 11)]
RIVALS = ["goodput:per=sequence", "nightjar", "tapout", "svip", "adaedl", "dsde"]
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
STREAMS = {
    **{f"{rate}": f"iid:{rate}" for rate in (0.3, 0.6, 0.8, 0.9, 0.95)},
    "0.95 / 0.4": "mixed:0.95,0.4",
    "all five": "mixed:0.3,0.6,0.8,0.9,0.95",
    "transition": "phases:0.95,0.4,64",
}
SHIFT = ("mt_bench", "translation", "summarization", "qa", "math_reasoning", "rag", "HumanEval")
NUM_SHIFTS = 6
"""times that the answers of a category are given"""
HALVES, TRANSITION = "0.95 / 0.4", "transition"
TURNS = ((0.95, 0.3), (0.8, 0.1), (0.3, 0.95), (0.8, 0.8))
"""rates of requests, and of those that come when all have ended"""
NUM_UNREAD = 500
"""tokens of a prompt there, that a draft has yet to read"""

Maker = Callable[[Requests], Policy]


@dataclass
class Cell:
    """One workload at one batch size: for every seed the requests to measure, and those served before."""

    name: str
    batch_size: int
    requests: list[Requests]
    before: list[Requests | None]
    are_unread: bool = False
    """a draft has prompts yet to read, and those before have all ended"""


@dataclass
class Speeds:
    """[seeds] tokens a second by policy."""

    by_policy: dict[str, np.ndarray]

    @property
    def best_static(self) -> str:
        return max(STATIC, key=lambda spec: float(self.by_policy[spec].mean()))

    def best(self, specs: list[str]) -> str:
        return max(specs, key=lambda spec: float(self.by_policy[spec].mean()))

    def ratio(self, first: str, second: str) -> tuple[float, float]:
        """Mean over seeds and the half width of its interval."""
        ratios = self.by_policy[first] / self.by_policy[second]
        return float(ratios.mean()), half_width(ratios)


class Bench:
    def __init__(
        self, costs: Costs | MeasuredCosts, noise: float = 0.0, drift: float = 0.0, period_s: float = 1.0
    ) -> None:
        self.costs = costs
        self.unsteady = (noise, drift, period_s) if noise or drift else None

    def speeds(self, cell: Cell, makers: dict[str, Maker]) -> Speeds:
        found: dict[str, list[float]] = {name: [] for name in makers}
        for seed, requests in enumerate(cell.requests):
            for name, make in makers.items():
                found[name].append(self.speed(make(requests), cell, seed))
        return Speeds({name: np.array(values) for name, values in found.items()})

    def speed(self, policy: Policy, cell: Cell, seed: int) -> float:
        costs: Any = self.costs if self.unsteady is None else Unsteady(self.costs, *self.unsteady, seed)
        before, unread = cell.before[seed], cell.are_unread
        if before is not None and not isinstance(policy, Follower):
            simulate(policy, before, costs, cell.batch_size, unread=unread)
            policy.forget(np.arange(cell.batch_size))
            if unread:
                # Those who were there in the end had had few tokens. Now all go on to their last.
                simulate(policy, before, costs, unread=True)
        return simulate(policy, cell.requests[seed], costs, cell.batch_size, unread=unread).tokens_per_s

    def told(self, kind: type[Follower], batch_size: int) -> Maker:
        return lambda requests: kind(requests, self.costs, batch_size)


def named(specs: list[str]) -> dict[str, Maker]:
    return {spec: lambda _, spec=spec: make_policy(spec) for spec in specs}  # type: ignore[misc]


def recorded_streams(trace: Path) -> dict[str, Recorded]:
    """Every category by itself, then all of them."""
    records = json.loads(trace.read_text(encoding="utf-8"))
    groups = {name: [r for r in records if r.get("cat") == name] for name in dict.fromkeys(r["cat"] for r in records)}
    groups["all"] = records
    streams = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, group in groups.items():
            path = Path(folder) / f"{name}.json"
            path.write_text(json.dumps(group), encoding="utf-8")
            streams[name] = Recorded(path)
    return streams


def recorded_cells(trace: Path, batch_size: int, num_tokens: int, num_seeds: int, cold: bool) -> Iterator[Cell]:
    """As many requests as Spec-Bench has of each category."""
    streams = recorded_streams(trace)
    for name, stream in streams.items():
        num = 80 if name != "all" else 2 * len(stream.records)
        requests = [stream.draw(num, num_tokens, seed) for seed in range(num_seeds)]
        served = [None if cold else streams["all"].draw(168, num_tokens, 100 + seed) for seed in range(num_seeds)]
        yield Cell(name, batch_size, requests, served)


def drawn_cell(name: str, batch_size: int, seeds: range, cold: bool, telling: bool) -> Cell:
    stream = make_stream(STREAMS[name] if telling else f"blind:{STREAMS[name]}")
    num, num_tokens = max(8, batch_size + batch_size // 2), 256
    requests = [stream.draw(num, num_tokens, seed) for seed in seeds]
    before = [None if cold else stream.draw(max(4, batch_size), num_tokens, 100 + seed) for seed in seeds]
    return Cell(name, batch_size, requests, before)


def turned_cell(before: float, after: float, batch_size: int, seeds: range) -> Cell:
    def draw(rate: float, num: int, seed: int) -> Requests:
        requests = make_stream(f"blind:iid:{rate}").draw(num, 256, seed)
        return replace(requests, num_prompt_tokens=np.full(num, NUM_UNREAD))

    return Cell(
        f"{before}, then {after}",
        batch_size,
        [draw(after, batch_size + batch_size // 2, seed) for seed in seeds],
        [draw(before, batch_size, 100 + seed) for seed in seeds],
        are_unread=True,
    )


def show(value: tuple[float, float]) -> str:
    return f"{value[0]:.3f} ± {value[1]:.3f}"


def print_header(columns: list[str]) -> None:
    print(f"\n| {' | '.join(columns)} |\n|{' --- |' * len(columns)}", flush=True)


def run_pair(bench: Bench, options: argparse.Namespace) -> None:
    rivals = [] if options.quick else RIVALS
    columns = ["best static", *rivals, "all told", "auto", "auto / best static", "auto / best single"]
    for batch_size in options.batches or (1, 2, 4, 8):
        makers = named(["off", *STATIC, *rivals, "auto"]) | {"all told": bench.told(Clairvoyant, batch_size)}
        print_header([f"batch {batch_size}", *columns])
        found = {}
        for cell in recorded_cells(options.trace, batch_size, options.tokens, options.seeds, options.cold):
            found[cell.name] = bench.speeds(cell, makers)
        single = max(STATIC, key=lambda spec: np.mean([found[n].ratio(spec, "off")[0] for n in found if n != "all"]))
        for name, speeds in found.items():
            best = speeds.best_static
            cells = [f"{speeds.ratio(spec, 'off')[0]:.2f}" for spec in (best, *rivals, "all told", "auto")]
            cells[0] += f" ({best.partition(':')[2]})"
            ratios = [show(speeds.ratio("auto", spec)) for spec in (best, single)]
            print(f"| {name} | {' | '.join(cells + ratios)} |", flush=True)
        names = [name for name in found if name != "all"]
        to_best = np.mean([found[n].ratio("auto", found[n].best_static)[0] for n in names])
        to_single = np.mean([found[n].ratio("auto", single)[0] for n in names])
        print(f"\nSpeed-up over off. auto, mean over categories: {to_best:.3f} of the best static length of each,")
        limit = np.mean([found[n].ratio("all told", found[n].best_static)[0] for n in names])
        print(f"{to_single:.3f} of the best single one ({single}). Who is told which tokens will stand: {limit:.3f}.")


def run_grid(bench: Bench, options: argparse.Namespace) -> None:
    rivals = [] if options.quick else RIVALS
    failures, behind, num_cells = [], [], 0
    columns = ["best static", *rivals, "oracle", "auto", "auto / best static", "auto / off", "auto / oracle"]
    for name in options.streams or STREAMS:
        print_header([name, *columns])
        for batch_size in options.batches or BATCHES:
            cell = drawn_cell(name, batch_size, options.drawn_seeds, options.cold, options.telling)
            makers = named(["off", *STATIC, *rivals, "auto"]) | {"oracle": bench.told(Oracle, batch_size)}
            speeds = bench.speeds(cell, makers)
            best = speeds.best_static
            cells = [f"{speeds.ratio(spec, 'off')[0]:.2f}" for spec in (best, *rivals, "oracle", "auto")]
            cells[0] += f" ({best.partition(':')[2]})"
            ratios = [speeds.ratio("auto", spec) for spec in (best, "off", "oracle")]
            print(f"| {batch_size} | {' | '.join(cells + [show(ratio) for ratio in ratios])} |", flush=True)
            failures += [f"{name}, batch {batch_size}: {text}" for text in verdicts(name, batch_size, speeds)]
            if rivals:
                first = speeds.best(rivals)
                lead, width = speeds.ratio("auto", first)
                num_cells += 1
                if lead + width < 1:
                    behind.append(f"{name}, batch {batch_size}: {show((lead, width))} of {first}")
    num_first = num_cells - len(behind)
    print(
        "\nSpeed-up over off." + (f" First or within the interval: {num_first} of {num_cells} cells." if rivals else "")
    )
    print("\n".join(["Behind the first:", *behind, ""]) if behind else "", end="")
    print("\n".join(["Not held:", *failures] if failures else ["Everything held."]), flush=True)


def verdicts(name: str, batch_size: int, speeds: Speeds) -> Iterator[str]:
    """What was promised of this cell and does not hold, the interval granted."""
    best = speeds.best_static
    limits = [("best static", best, 1.0 if name == TRANSITION else 0.97), ("off", "off", 0.98)]
    if name == HALVES and 8 <= batch_size <= 128:
        limits.append(("oracle", "oracle", 0.95))
        if speeds.ratio("oracle", best)[0] > 1.03:
            limits.append(("best static", best, 1.0))
    if name == TRANSITION:
        limits.append(("oracle", "oracle", 0.93))
    for what, spec, least in limits:
        ratio, width = speeds.ratio("auto", spec)
        if ratio + width < least:
            yield f"{ratio:.3f} of {what}, at least {least}"
        elif ratio < least:
            yield f"{ratio:.3f} ± {width:.3f} of {what}, at least {least}: within the interval"


def run_ablation(bench: Bench, options: argparse.Namespace) -> None:
    """Speed of every variant over that of auto as it is."""
    makers: dict[str, Maker] = named(["auto"]) | {name: (lambda _, m=make: m()) for name, make in ABLATIONS.items()}
    print_header(["", *ABLATIONS])
    for batch_size in options.batches or (1, 8, 64):
        found = [
            bench.speeds(cell, makers)
            for cell in recorded_cells(options.trace, batch_size, options.tokens, options.seeds, options.cold)
            if cell.name != "all"
        ]
        ratios = [f"{np.mean([speeds.ratio(name, 'auto')[0] for speeds in found]):.3f}" for name in ABLATIONS]
        print(f"| pair, batch {batch_size} | {' | '.join(ratios)} |", flush=True)
        for name in options.streams or ("0.8", HALVES, TRANSITION):
            speeds = bench.speeds(
                drawn_cell(name, batch_size, options.drawn_seeds, options.cold, options.telling), makers
            )
            ratios = [show(speeds.ratio(variant, "auto")) for variant in ABLATIONS]
            print(f"| {name}, batch {batch_size} | {' | '.join(ratios)} |", flush=True)


def run_shift(bench: Bench, options: argparse.Namespace) -> None:
    """Policies go from category to category with what they have learnt. Of each the same few answers, several times, of
    which the last two count: `pair.py` in virtual time."""
    streams = recorded_streams(options.trace)
    names = [name for name in SHIFT if name in streams]
    for batch_size in options.batches or (1, 8):
        print_header([f"batch {batch_size}", *names, "mean", "least"])
        plain: dict[str, np.ndarray] = {}
        for spec in ["off", *STATIC, *([] if options.quick else RIVALS), "auto"]:
            speeds = {name: np.zeros(options.seeds) for name in names}
            for seed in range(options.seeds):
                policy = make_policy(spec)
                for name in names:
                    requests = streams[name].draw(max(3, batch_size), options.tokens, seed)
                    for number in range(NUM_SHIFTS):
                        result = simulate(policy, requests, bench.costs, batch_size, unread=options.unread)
                        policy.forget(np.arange(batch_size))
                        if number >= NUM_SHIFTS - 2:
                            speeds[name][seed] += result.tokens_per_s
            plain = plain or speeds
            ratios = np.array([speeds[name] / plain[name] for name in names])
            cells = [f"{ratio:.2f}" for ratio in [*ratios.mean(axis=1), ratios.mean(), ratios.min()]]
            print(f"| {spec} | {' | '.join(cells)} |", flush=True)


def run_turn(bench: Bench, options: argparse.Namespace) -> None:
    for batch_size in options.batches or (8, 64, 128):
        print_header([f"batch {batch_size}", "best static", "auto", "auto / best static", "auto / off"])
        for before, after in TURNS:
            cell = turned_cell(before, after, batch_size, options.drawn_seeds)
            speeds = bench.speeds(cell, named(["off", *STATIC, "auto"]))
            best = speeds.best_static
            cells = [f"{speeds.ratio(spec, 'off')[0]:.2f}" for spec in (best, "auto")]
            cells[0] += f" ({best.partition(':')[2]})"
            ratios = [show(speeds.ratio("auto", spec)) for spec in (best, "off")]
            print(f"| {cell.name} | {' | '.join(cells + ratios)} |", flush=True)


def run_looks(_: Bench, options: argparse.Namespace) -> None:
    for names, loss in log_losses(options.trace).items():
        print(f"log-loss knowing {names}: {loss:.3f}", flush=True)


PARTS = {
    "pair": run_pair,
    "grid": run_grid,
    "ablation": run_ablation,
    "shift": run_shift,
    "turn": run_turn,
    "looks": run_looks,
}


def read_costs(text: str, **replaced_ms: float | None) -> Costs | MeasuredCosts:
    """With `ruled` and `end` milliseconds instead of what is in the file, where they are given."""
    replaced = {f"{name}_s": value / 1e3 for name, value in replaced_ms.items() if value is not None}
    if text in COSTS:
        if replaced:
            raise InvalidInput(f"--ruled-ms and --end-ms go with a file of costs, and {text} is none")
        return make_costs(text)
    given = Path(text).read_text(encoding="utf-8")
    with suppress(ValueError, TypeError):  # of which `make_costs` says what is wrong
        given = json.dumps(json.loads(given) | replaced)
    return make_costs(given)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--trace", type=Path, default=TRACE)
    parser.add_argument("--costs", default=str(FOLDER / "costs_h200.json"), help=f"a file, or {', '.join(COSTS)}")
    parser.add_argument("--ruled-ms", type=float, help="that a draft takes longer if a rule may end it; of a file")
    parser.add_argument("--end-ms", type=float, help="that a draft takes longer behind somebody's end; of a file")
    parser.add_argument("--noise", type=float, default=0.0, help="of single passes, as a share; no noise: 0")
    parser.add_argument("--drift", type=float, default=0.0, help="of the whole machine, as a share; none: 0")
    parser.add_argument("--period", type=float, default=20.0, help="seconds that a wave of the drift lasts, about")
    parser.add_argument("--batches", type=lambda text: [int(item) for item in text.split(",")])
    parser.add_argument("--streams", type=lambda text: [item.strip() for item in text.split(";")], help="as in 0.3;0.8")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--first-seed", type=int, default=1000, help="of drawn requests; auto was made looking at 0 to 2"
    )
    parser.add_argument("--tokens", type=int, default=192, help="of a recorded answer, at most")
    parser.add_argument("--cold", action="store_true", help="policies have served nothing before")
    parser.add_argument(
        "--telling", action="store_true", help="drawn signals go with agreement, as those of real models"
    )
    parser.add_argument("--unread", action="store_true", help="of shift: a draft has its request's prompt yet to read")
    parser.add_argument("--quick", action="store_true", help="without the rivals")
    options = parser.parse_args()
    options.drawn_seeds = range(options.first_seed, options.first_seed + options.seeds)
    try:
        costs = read_costs(options.costs, ruled=options.ruled_ms, end=options.end_ms)
        PARTS[options.part](Bench(costs, options.noise, options.drift, options.period), options)
    except (InvalidInput, OSError) as error:
        sys.exit(f"auto.py: {error}")


if __name__ == "__main__":
    main()
