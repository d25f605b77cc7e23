"""Pictures of a run, drawn with matplotlib from what was measured. Each function gives a figure, or None where there is
nothing to show.

Ink and grid have colours of their own that stand for "as the page": the HTML report replaces them by its style.
"""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO, StringIO
from typing import TYPE_CHECKING, Any

from dsde.bench.results import Results, Trace
from dsde.bench.summary import CellSummary, Row, is_static, speeds_by_kind
from dsde.core.errors import DsdeError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, MUTED, GRID = "#1b1f24", "#68707a", "#d9dee4"
WIDTH = 4.8
"""inches: narrow enough to be read on a phone"""
GREY = "#8a9099"
STATIC = ("#9ecae1", "#6baed6", "#4292c6", "#2171b5", "#08519c")
"""paler: shorter"""
OTHERS = ("#e08214", "#1b9e77", "#c51b7d", "#7570b3", "#a6761d", "#66a61e", "#17becf", "#d6604d")
ACCEPTED, REJECTED, OWN = "#2e9e5b", "#d6604d", "#4292c6"
MARKERS = "osD^vPX*"


class NoPlots(DsdeError):
    """Pictures were asked for and cannot be drawn."""


def require_matplotlib() -> None:
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise NoPlots("Plots need matplotlib, which is not installed: pip install 'dsde[bench]'.") from None


def colours(names: Sequence[str]) -> dict[str, str]:
    """The same contender has the same colour in every picture of a run."""
    statics = sorted((name for name in names if is_static(name)), key=_static_length)
    spread = [STATIC[round(i * (len(STATIC) - 1) / max(len(statics) - 1, 1))] for i in range(len(statics))]
    chosen = dict(zip(statics, spread, strict=True)) | {"off": GREY}
    others = [name for name in names if name not in chosen]
    return chosen | {name: OTHERS[place % len(OTHERS)] for place, name in enumerate(others)}


def draw(results: Results, summaries: Sequence[CellSummary]) -> dict[str, Figure]:
    """All pictures that a run has something for, by name."""
    require_matplotlib()
    if not summaries:
        return {}
    palette = colours(list(dict.fromkeys(row.contender for summary in summaries for row in summary.rows)))
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
    "throughput": "Tokens a second against the batch size, with 95 % intervals.",
    "request": "One request, step by step: what was drafted, what stood, and the signals behind it.",
    "lengths": "How many tokens were drafted at a time.",
    "waste": "What drafting brought, against what of it was thrown away. Up and left is better.",
}


def speedup(summaries: Sequence[CellSummary], palette: dict[str, str]) -> Figure | None:
    """Dots with intervals: kinds of text down, contenders beside each other."""
    shown = [s for s in summaries if s.cell.batch_size == summaries[0].cell.batch_size]
    shown = [s for s in shown if s.cell.temperature == shown[0].cell.temperature]
    speeds = [speed for speed in speeds_by_kind([s.cell for s in shown]) if speed.contender != "off"]
    if not speeds:
        return None
    labels = list(dict.fromkeys(speed.label for speed in speeds))
    names = [name for name in palette if any(speed.contender == name for speed in speeds)]
    figure, axes = _figure(1.0 + len(labels) * (0.17 * len(names) + 0.18))
    for speed in speeds:
        place = labels.index(speed.label) + (names.index(speed.contender) + 0.5) / len(names) * 0.84 - 0.42
        estimate, colour = speed.vs_off, palette[speed.contender]
        axes.plot([estimate.low, estimate.high], [place, place], color=colour, linewidth=1.6)
        marker = MARKERS[names.index(speed.contender) % len(MARKERS)]
        axes.plot([estimate.value], [place], marker, color=colour, markersize=4.5)
    axes.axvline(1, color=MUTED, linewidth=1)
    for border in range(1, len(labels)):
        axes.axhline(border - 0.5, color=GRID, linewidth=0.8)
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.grid(axis="x", color=GRID, linewidth=0.6)
    cell = shown[0].cell
    axes.set_xlabel(f"times as fast as off (batch {cell.batch_size}, temperature {cell.temperature:g})")
    _legend(figure, [(name, palette[name], MARKERS[i % len(MARKERS)]) for i, name in enumerate(names)])
    return figure


def throughput(summaries: Sequence[CellSummary], palette: dict[str, str]) -> Figure | None:
    first = summaries[0].cell
    shown = [s for s in summaries if (s.cell.workload, s.cell.temperature) == (first.workload, first.temperature)]
    sizes = [s.cell.batch_size for s in shown]
    if len(sizes) < 2:
        return None
    figure, axes = _figure(3.4)
    names = [name for name in palette if any(s.row(name) for s in shown)]
    for number, name in enumerate(names):
        rows = [row for s in shown if (row := s.row(name))]
        places, speeds = [row.batch_size for row in rows], [row.tokens_per_s for row in rows]
        marker = MARKERS[number % len(MARKERS)]
        axes.plot(places, [one.value for one in speeds], f"-{marker}", color=palette[name], markersize=4, linewidth=1.4)
        low, high = [one.low for one in speeds], [one.high for one in speeds]
        axes.fill_between(places, low, high, color=palette[name], alpha=0.15, linewidth=0)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.minorticks_off()
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_major_locator(_round_ticks())
    axes.grid(color=GRID, linewidth=0.6)
    axes.set_xlabel("batch size")
    axes.set_ylabel("tokens/s")
    _legend(figure, [(name, palette[name], MARKERS[i % len(MARKERS)]) for i, name in enumerate(names)])
    return figure


def request(trace: Trace | None) -> Figure | None:
    """Drafted and accepted tokens of every step, and under it KLD, scale factor and WVIR."""
    if trace is None or not trace.steps:
        return None
    steps = trace.steps
    panels: list[tuple[str, list[float | None]]] = [("mean KLD", [_mean(step["klds"]) for step in steps])]
    for heading, name in (("SF", "scale_factor"), ("WVIR", "wvir")):
        values = [step["signals"].get(name) for step in steps]
        if any(value is not None for value in values):
            panels.append((heading, values))
    figure, several = _figures([2.2, *[0.9] * len(panels)])
    draw_lengths(several[0], steps)
    for axes, (heading, values) in zip(several[1:], panels, strict=True):
        places = [place for place, value in enumerate(values) if value is not None]
        axes.plot(places, [value for value in values if value is not None], color=INK, linewidth=1)
        axes.set_ylabel(heading)
        axes.grid(color=GRID, linewidth=0.6)
        if heading == "SF":
            axes.set_yscale("symlog", linthresh=1)
            axes.set_yticks([0, 1, 100], ["0", "1", "100"])
            axes.axhline(1, color=MUTED, linewidth=0.8, linestyle=":")
    several[-1].set_xlabel(f"step of one request ({trace.contender}, {trace.kind})")
    keys = [("accepted", ACCEPTED, "s"), ("rejected", REJECTED, "s"), ("wanted", INK, "_")]
    _legend(figure, [*keys, ("cap", MUTED, "_")] if any(step["cap"] is not None for step in steps) else keys)
    return figure


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


def lengths(summaries: Sequence[CellSummary], palette: dict[str, str]) -> Figure | None:
    """A histogram for every contender that chooses, all in one cell."""
    rows = [row for row in summaries[0].rows if row.num_draft_tokens and not is_static(row.contender)]
    if not rows:
        return None
    longest = min(max(len(row.drafts_by_length) for row in rows), 21)
    figure, several = _figures([0.75] * len(rows))
    for axes, row in zip(several, rows, strict=True):
        counts = list(row.drafts_by_length[:longest])
        counts[-1] += sum(row.drafts_by_length[longest:])
        total = sum(counts) or 1
        axes.bar(
            range(len(counts)), [100 * count / total for count in counts], color=palette[row.contender], width=0.85
        )
        axes.set_xlim(-0.7, longest - 0.3)
        mean = "" if row.mean_length is None else f", mean {row.mean_length:.1f}"
        axes.set_title(f"{row.contender}{mean}", fontsize=9, loc="left", pad=3)
        axes.grid(axis="y", color=GRID, linewidth=0.6)
        axes.yaxis.set_major_formatter("{x:g} %")
    several[-1].set_xlabel("tokens drafted in a step")
    several[-1].set_xticks(range(0, longest, 1 if longest <= 12 else 2))
    return figure


def waste(summaries: Sequence[CellSummary], palette: dict[str, str]) -> Figure | None:
    rows = [row for row in summaries[0].rows if row.num_draft_tokens and row.num_wasted_tokens is not None]
    if not rows:
        return None
    figure, axes = _figure(3.4)
    for row in rows:
        place, estimate, colour = _wasted(row), row.vs_off, palette[row.contender]
        axes.plot([place, place], [estimate.low, estimate.high], color=colour, linewidth=1.2, alpha=0.6)
        axes.plot([place], [estimate.value], "o", color=colour, markersize=6)
    _place_names(axes, [(_wasted(row), row.vs_off.value, row.contender) for row in rows])
    axes.axhline(1, color=MUTED, linewidth=1)
    axes.margins(x=0.18, y=0.1)
    axes.grid(color=GRID, linewidth=0.6)
    axes.set_xlabel("tokens drafted in vain for each one emitted")
    axes.set_ylabel("times as fast as off")
    return figure


def _wasted(row: Row) -> float:
    return (row.num_wasted_tokens or 0.0) / max(row.num_tokens, 1)


def _place_names(axes: Axes, points: list[tuple[float, float, str]]) -> None:
    """Names beside their points, moved apart where they would cover each other."""
    axes.autoscale_view()
    low, high = axes.get_ylim()
    gap = 0.06 * (high - low)
    previous = float("-inf")
    for x, y, name in sorted(points, key=lambda point: point[1]):
        previous = max(y, previous + gap)
        axes.annotate(name, (x, previous), (7, 0), textcoords="offset points", va="center", fontsize=8.5, color=INK)


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


def _figure(height: float) -> tuple[Figure, Axes]:
    figure, several = _figures([height])
    return figure, several[0]


def _figures(heights: Sequence[float]) -> tuple[Figure, list[Axes]]:
    """Panels below each other that share their x axis."""
    require_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, sum(heights) + 0.5), layout="constrained")
    several = figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=list(heights))[:, 0].tolist()
    for axes in several:
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(MUTED)
        axes.tick_params(colors=INK, labelsize=9, color=MUTED)
        axes.xaxis.label.set(color=INK, size=9)
        axes.yaxis.label.set(color=INK, size=9)
        axes.title.set_color(INK)
        axes.set_facecolor("none")
        axes.set_axisbelow(True)
    figure.patch.set_alpha(0)
    return figure, several


def _legend(figure: Figure, entries: Sequence[tuple[str, str, str]]) -> None:
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], color=colour, marker=marker, linestyle="none", label=name) for name, colour, marker in entries
    ]
    longest = max(len(name) for name, _, _ in entries)
    columns = max(1, min(len(entries), int(56 / (longest + 5))))
    legend = figure.legend(
        handles=handles, loc="outside upper left", ncols=columns, frameon=False, fontsize=8.5, columnspacing=1.0
    )
    for text in legend.get_texts():
        text.set_color(INK)


def _round_ticks() -> Any:
    from matplotlib.ticker import LogLocator

    return LogLocator(base=10, subs=(1, 2, 5))


def to_svg(figure: Figure, text_as_paths: bool = False) -> str:
    import matplotlib

    buffer = StringIO()
    kind = "path" if text_as_paths else "none"
    with matplotlib.rc_context({"svg.fonttype": kind, "svg.hashsalt": "dsde", "font.family": "sans-serif"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return buffer.getvalue()


def to_png(figure: Figure) -> bytes:
    buffer = BytesIO()
    figure.savefig(buffer, format="png", dpi=200, facecolor="white")
    return buffer.getvalue()
