"""The pictures of a run, from what was measured: figures, or None where there is nothing to show."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dsde.bench.drawing import GRID, INK, MUTED, Look, add_legend, one_panel, panels, require_matplotlib
from dsde.bench.results import Results, Trace
from dsde.bench.setting import BASE
from dsde.bench.summary import CellSummary, Row, is_static, speeds_by_kind

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GREY = "#8a9099"
STATIC = ("#9ecae1", "#74b3d8", "#4a98c9", "#2a7ab9", "#1764ab")
"""paler: shorter"""
OTHERS = ("#e08214", "#1b9e77", "#c51b7d", "#7570b3", "#a6761d", "#66a61e", "#17becf", "#d6604d")
ACCEPTED, REJECTED, OWN = "#2e9e5b", "#d6604d", "#4292c6"
MARKERS = "osD^vPX*"


def looks(names: Sequence[str]) -> dict[str, Look]:
    """The same contender looks the same in every picture of a run."""
    statics = sorted((name for name in names if is_static(name)), key=_static_length)
    spread = [STATIC[round(i * (len(STATIC) - 1) / max(len(statics) - 1, 1))] for i in range(len(statics))]
    chosen = dict(zip(statics, spread, strict=True)) | {BASE: GREY}
    others = [name for name in names if name not in chosen]
    chosen |= {name: OTHERS[place % len(OTHERS)] for place, name in enumerate(others)}
    return {name: Look(chosen[name], MARKERS[place % len(MARKERS)]) for place, name in enumerate(names)}


def draw(results: Results, summaries: Sequence[CellSummary]) -> dict[str, Figure]:
    """All pictures that a run has something for, by name."""
    require_matplotlib()
    if not summaries:
        return {}
    palette = looks(list(dict.fromkeys(row.contender for summary in summaries for row in summary.rows)))
    drawn = {
        "speedup": speedup(summaries, palette),
        "throughput": throughput(summaries, palette),
        "request": request(_shown(results.traces)),
        "lengths": lengths(summaries, palette),
        "waste": waste(summaries, palette),
    }
    return {name: figure for name, figure in drawn.items() if figure is not None}


CAPTIONS = {
    "speedup": "Speed against off, by kind of text. Bars are 95 % intervals over rounds and requests.",
    "throughput": "Tokens a second, and speed against off, by batch size, with 95 % intervals.",
    "request": "One request, step by step: what was drafted, what stood, and the signals behind it.",
    "lengths": "How many tokens were drafted at a time.",
    "waste": "What drafting brought, against what of it was thrown away. Up and left is better.",
}


def speedup(summaries: Sequence[CellSummary], palette: dict[str, Look]) -> Figure | None:
    """Dots with intervals: kinds of text down, contenders beside each other."""
    shown = [s for s in summaries if s.cell.batch_size == summaries[0].cell.batch_size]
    shown = [s for s in shown if s.cell.temperature == shown[0].cell.temperature]
    speeds = [speed for speed in speeds_by_kind([s.cell for s in shown]) if speed.contender != BASE]
    if not speeds:
        return None
    labels = list(dict.fromkeys(speed.label for speed in speeds))
    names = [name for name in palette if any(speed.contender == name for speed in speeds)]
    figure, axes = one_panel(0.5 + len(labels) * (0.115 * len(names) + 0.15))
    for speed in speeds:
        place = labels.index(speed.label) + (names.index(speed.contender) + 0.5) / len(names) * 0.84 - 0.42
        estimate, (colour, marker) = speed.vs_off, palette[speed.contender]
        axes.plot([estimate.low, estimate.high], [place, place], color=colour, linewidth=1.4, alpha=0.7)
        axes.plot([estimate.value], [place], marker, color=colour, markersize=4)
    axes.axvline(1, color=MUTED, linewidth=1)
    for border in range(1, len(labels)):
        axes.axhline(border - 0.5, color=GRID, linewidth=0.8)
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.grid(axis="x", color=GRID, linewidth=0.6)
    cell = shown[0].cell
    axes.set_xlabel(f"times as fast as off (batch {cell.batch_size}, temperature {cell.temperature:g})")
    add_legend(figure, {name: palette[name] for name in names})
    return figure


def throughput(summaries: Sequence[CellSummary], palette: dict[str, Look]) -> Figure | None:
    """Tokens a second against the batch size, and the same as a multiple of `off`."""
    first = summaries[0].cell
    shown = [s for s in summaries if (s.cell.workload, s.cell.temperature) == (first.workload, first.temperature)]
    if len(shown) < 2:
        return None
    figure, (absolute, relative) = panels([2.0, 2.0])
    names = [name for name in palette if any(summary.row(name) for summary in shown)]
    for number, name in enumerate(names):
        rows = [row for summary in shown if (row := summary.row(name))]
        # A little beside each other, or their intervals would cover each other.
        places = [row.batch_size * 1.012 ** (number - len(names) / 2) for row in rows]
        for axes, estimates in (
            (absolute, [row.tokens_per_s for row in rows]),
            (relative, [row.vs_off for row in rows]),
        ):
            colour, marker = palette[name]
            axes.plot(places, [one.value for one in estimates], f"-{marker}", color=colour, markersize=4, linewidth=1.2)
            low, high = [one.low for one in estimates], [one.high for one in estimates]
            axes.vlines(places, low, high, color=colour, alpha=0.6)
    sizes = [summary.cell.batch_size for summary in shown]
    relative.set_xscale("log", base=2)
    relative.set_xticks(sizes, [str(size) for size in sizes])
    relative.set_xlabel(f"batch size ({first.name}, temperature {first.temperature:g})")
    relative.set_ylabel("times off")
    relative.axhline(1, color=MUTED, linewidth=1)
    absolute.set_yscale("log")
    absolute.yaxis.set_major_formatter("{x:g}")
    absolute.yaxis.set_major_locator(_round_ticks())
    absolute.set_ylabel("tokens/s")
    for axes in (absolute, relative):
        axes.minorticks_off()
        axes.grid(color=GRID, linewidth=0.6)
    add_legend(figure, {name: palette[name] for name in names})
    return figure


def request(trace: Trace | None) -> Figure | None:
    """Drafted and accepted tokens of every step, and under it KLD, scale factor and WVIR."""
    if trace is None or not trace.steps:
        return None
    signals = signal_panels(trace)
    figure, several = panels([2.2, *[0.9] * len(signals)])
    draw_steps(several, trace, signals)
    keys = {"accepted": Look(ACCEPTED, "s"), "rejected": Look(REJECTED, "s"), "wanted": Look(INK, "_")}
    if any(step["cap"] is not None for step in trace.steps):
        keys["cap"] = Look(MUTED, "_")
    add_legend(figure, keys)
    return figure


def signal_panels(trace: Trace) -> list[tuple[str, list[float | None]]]:
    """Named signals, a value for every step: what DSDE goes by, as far as there is any of it."""
    found: list[tuple[str, list[float | None]]] = [("mean KLD", [_mean(step["klds"]) for step in trace.steps])]
    for heading, name in (("SF", "scale_factor"), ("WVIR", "wvir")):
        found.append((heading, [step["signals"].get(name) for step in trace.steps]))
    return [(heading, values) for heading, values in found if any(value is not None for value in values)]


def draw_steps(several: Sequence[Axes], trace: Trace, signals: list[tuple[str, list[float | None]]]) -> None:
    """Lengths into the first panel, a signal into each of the others."""
    draw_lengths(several[0], trace.steps)
    for axes in several[:-1]:
        axes.tick_params(labelbottom=False)
    for axes, (heading, values) in zip(several[1:], signals, strict=True):
        places = [place for place, value in enumerate(values) if value is not None]
        axes.plot(places, [value for value in values if value is not None], color=INK, linewidth=1)
        axes.set_ylabel(heading)
        axes.grid(color=GRID, linewidth=0.6)
        if heading == "SF":
            axes.set_yscale("symlog", linthresh=1)
            axes.set_yticks([0, 1, 100], ["0", "1", "100"])
            axes.axhline(1, color=MUTED, linewidth=0.8, linestyle=":")
    several[-1].set_xlabel(f"step of one request ({trace.contender}, {trace.kind})")


def draw_lengths(axes: Axes, steps: Sequence[dict[str, Any]]) -> None:
    places = range(len(steps))
    accepted = [step["accepted"] for step in steps]
    axes.bar(places, accepted, width=0.9, color=ACCEPTED)
    rejected = [step["drafted"] - step["accepted"] for step in steps]
    axes.bar(places, rejected, bottom=accepted, width=0.9, color=REJECTED, alpha=0.55)
    for name, colour, style in (("predicted", INK, "-"), ("cap", MUTED, ":")):
        known = [(place, step[name]) for place, step in enumerate(steps) if step[name] is not None]
        if known:
            axes.step(*zip(*known, strict=True), where="mid", color=colour, linewidth=1, linestyle=style)
    axes.set_ylabel("drafted tokens")
    longest = max(step["drafted"] for step in steps)
    axes.set_ylim(0, max(longest, 1) * 1.15)
    axes.grid(axis="y", color=GRID, linewidth=0.6)


def lengths(summaries: Sequence[CellSummary], palette: dict[str, Look]) -> Figure | None:
    """A histogram for every contender that chooses, all in one cell."""
    rows = [row for row in summaries[0].rows if sum(row.drafts_by_length[1:]) and not is_static(row.contender)]
    if not rows:
        return None
    longest = max(_usual_length(row.drafts_by_length) for row in rows) + 1
    figure, several = panels([0.75] * len(rows))
    for axes, row in zip(several, rows, strict=True):
        counts = list(row.drafts_by_length[:longest])
        counts[-1] += sum(row.drafts_by_length[longest:])
        total = sum(counts) or 1
        axes.bar(
            range(len(counts)),
            [100 * count / total for count in counts],
            color=palette[row.contender].colour,
            width=0.85,
        )
        axes.set_xlim(-0.7, longest - 0.3)
        mean = "" if row.mean_length is None else f", mean {row.mean_length:.1f}"
        axes.set_title(f"{row.contender}{mean}", fontsize=9, loc="left", pad=3, color=INK)
        axes.grid(axis="y", color=GRID, linewidth=0.6)
        axes.yaxis.set_major_formatter("{x:g} %")
    several[-1].set_xlabel("tokens drafted in a step")
    several[-1].set_xticks(range(0, longest, 1 if longest <= 12 else 2))
    return figure


def waste(summaries: Sequence[CellSummary], palette: dict[str, Look]) -> Figure | None:
    rows = [row for row in summaries[0].rows if row.num_draft_tokens and row.num_wasted_tokens is not None]
    if not rows:
        return None
    figure, axes = one_panel(3.0)
    for row in rows:
        place, estimate, (colour, marker) = _wasted(row), row.vs_off, palette[row.contender]
        axes.plot([place, place], [estimate.low, estimate.high], color=colour, linewidth=1.4, alpha=0.6)
        axes.plot([place], [estimate.value], marker, color=colour, markersize=6)
    axes.axhline(1, color=MUTED, linewidth=1)
    axes.set_xlim(left=0)
    axes.grid(color=GRID, linewidth=0.6)
    axes.set_xlabel("tokens drafted in vain for each one emitted")
    axes.set_ylabel("times as fast as off")
    add_legend(figure, {row.contender: palette[row.contender] for row in rows})
    return figure


def _wasted(row: Row) -> float:
    return (row.num_wasted_tokens or 0.0) / max(row.num_tokens, 1)


def _usual_length(counts: Sequence[int]) -> int:
    """Beyond which hardly any draft goes."""
    few = 0.005 * sum(counts)
    return max((length for length, count in enumerate(counts) if count > few), default=1)


def _shown(traces: Sequence[Trace]) -> Trace | None:
    """The one that has most to tell: with the signals of DSDE, otherwise of whoever chooses."""
    by_signals = [trace for trace in traces if any("wvir" in step["signals"] for step in trace.steps)]
    choosing = [trace for trace in traces if not is_static(trace.contender)]
    return next(iter([*by_signals, *choosing, *traces]), None)


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _static_length(name: str) -> int:
    digits = name.partition(":")[2]
    return int(digits) if digits.isdigit() else 0


def _round_ticks() -> Any:
    from matplotlib.ticker import LogLocator

    return LogLocator(base=10, subs=(1, 2, 5))
