"""One request as a picture: every token in the colour of where it came from, and under it what the steps knew."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dsde.bench import drawing, plots
from dsde.bench.passages import UNKNOWN, Origin, Piece, is_complete, passages
from dsde.bench.results import Trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {Origin.ACCEPTED: "#bfe5cc", Origin.REJECTED: "#f6c9c0", Origin.OWN: "#cfe1f2"}
INK = {Origin.ACCEPTED: "#12402a", Origin.REJECTED: "#8a2d1f", Origin.OWN: "#12365c"}
COLUMNS = 92
WIDTH = 8.2
LINE = 0.19
"""inches, like the width"""
SIZE = 8.0
"""of letters, in points"""


def draw_trace(trace: Trace) -> Figure:
    drawing.require_matplotlib()
    from matplotlib.figure import Figure

    lines = wrap(passages(trace), COLUMNS)
    panels = plots.signal_panels(trace)
    heights = [LINE * (len(lines) + 0.5), 1.7, *[0.8] * len(panels)]
    figure = Figure(figsize=(WIDTH, sum(heights) + 1.0), layout="constrained", facecolor="white")
    grid = figure.add_gridspec(len(heights), 1, height_ratios=heights)
    text = figure.add_subplot(grid[0])
    _draw_text(text, lines)
    several = [figure.add_subplot(grid[place]) for place in range(1, len(heights))]
    for axes in several:
        drawing.style(axes)
        axes.set_xlim(-0.7, len(trace.steps) - 0.3)
    plots.draw_steps(several, trace, panels)
    known = "" if is_complete(trace) else f"; {UNKNOWN}: a rejected token that never left the device"
    text.set_title(f"{trace.contender}: {_shortened(trace.prompt)}{known}", fontsize=9, loc="left", color=drawing.INK)
    _legend(figure)
    return figure


def wrap(parts: list[list[Piece]], columns: int) -> list[list[Piece]]:
    """Lines of at most so many letters; line breaks of the text are shown and kept."""
    lines: list[list[Piece]] = [[]]
    used = 0
    for piece in (piece for part in parts for piece in part):
        breaks = piece.text.count("\n") if piece.origin is not Origin.REJECTED else 0
        shown = piece.on_one_line
        if used + len(shown) > columns and used:
            lines.append([])
            used = 0
        lines[-1].append(Piece(shown, piece.origin))
        used += len(shown)
        if breaks:
            lines.append([])
            used = 0
    return [line for line in lines if line]


def _draw_text(axes: Axes, lines: list[list[Piece]]) -> None:
    from matplotlib.patches import Rectangle

    axes.set_xlim(0, COLUMNS)
    axes.set_ylim(len(lines) + 0.2, -0.3)
    axes.axis("off")
    for number, line in enumerate(lines):
        column = 0
        for piece in line:
            width = len(piece.text)
            box = Rectangle(
                (column + 0.06, number + 0.06), width - 0.12, 0.86, color=COLOURS[piece.origin], linewidth=0
            )
            axes.add_patch(box)
            for place, letter in enumerate(piece.text):
                # Letter by letter: the spacing of the font is not quite that of the columns.
                axes.text(
                    column + place + 0.5,
                    number + 0.5,
                    letter,
                    family="monospace",
                    fontsize=SIZE,
                    ha="center",
                    va="center_baseline",
                    color=INK[piece.origin],
                    alpha=0.75 if piece.origin is Origin.REJECTED else 1,
                    parse_math=False,
                )
            if piece.origin is Origin.REJECTED:
                axes.plot(
                    [column + 0.1, column + width - 0.1], [number + 0.5] * 2, color=INK[piece.origin], linewidth=0.6
                )
            column += width


def _legend(figure: Figure) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(color=COLOURS[origin], label=origin.value) for origin in Origin]
    figure.legend(handles=handles, loc="outside upper left", ncols=3, frameon=False, fontsize=8.5)


def _shortened(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 80 else f"{line[:77]}..."
