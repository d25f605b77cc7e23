"""What all pictures share: colours, panels, legends, and how a figure becomes a file. Knows nothing of what is drawn.

Ink and grid have colours of their own that stand for "as the page": the HTML report replaces them by its style.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from io import BytesIO, StringIO
from typing import TYPE_CHECKING, Any, NamedTuple

from dsde.core.errors import DsdeError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, MUTED, GRID = "#1b1f24", "#68707a", "#d9dee4"
WIDTH = 4.8
"""inches: narrow enough to be read on a phone"""


class NoPlots(DsdeError):
    """Pictures were asked for and cannot be drawn."""


def require_matplotlib() -> None:
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise NoPlots("Plots need matplotlib, which is not installed: pip install 'dsde[bench]'.") from None


class Look(NamedTuple):
    colour: str
    marker: str


def one_panel(height: float) -> tuple[Figure, Axes]:
    figure, several = panels([height])
    return figure, several[0]


def panels(heights: Sequence[float]) -> tuple[Figure, list[Axes]]:
    """Panels below each other that share their x axis."""
    require_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, sum(heights) + 0.5), layout="constrained")
    several = figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=list(heights))[:, 0].tolist()
    for axes in several:
        style(axes)
    figure.patch.set_alpha(0)
    return figure, several


def style(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(MUTED)
    axes.tick_params(colors=INK, labelsize=9, color=MUTED)
    axes.xaxis.label.set(color=INK, size=9)
    axes.yaxis.label.set(color=INK, size=9)
    axes.set_facecolor("none")
    axes.set_axisbelow(True)


def add_legend(figure: Figure, entries: dict[str, Look]) -> None:
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], color=look.colour, marker=look.marker, linestyle="none", label=name)
        for name, look in entries.items()
    ]
    columns = max(1, min(len(entries), int(68 / (max(map(len, entries)) + 4))))
    legend = figure.legend(
        handles=handles, loc="outside upper left", ncols=columns, frameon=False, fontsize=8.5, columnspacing=1.0
    )
    for text in legend.get_texts():
        text.set_color(INK)


def to_svg(figure: Figure, text_as_paths: bool = False) -> str:
    import matplotlib

    buffer = StringIO()
    kind = "path" if text_as_paths else "none"
    with matplotlib.rc_context({"svg.fonttype": kind, "svg.hashsalt": "dsde", "font.family": "sans-serif"}):
        _save(figure, buffer, "svg")
    # Who made it and in which vocabulary: of no use within a page, and full of addresses.
    return re.sub(r"\s*<metadata>.*?</metadata>", "", buffer.getvalue(), count=1, flags=re.DOTALL)


def to_png(figure: Figure) -> bytes:
    buffer = BytesIO()
    _save(figure, buffer, "png")
    return buffer.getvalue()


def _save(figure: Figure, buffer: BytesIO | StringIO, kind: str) -> None:
    options: dict[str, Any] = {"dpi": 200, "facecolor": "white"} if kind == "png" else {}
    with warnings.catch_warnings():
        # Texts may be in any script; what the font has no letter for is drawn as a box.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure.savefig(buffer, format=kind, **options)
