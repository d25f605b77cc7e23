"""`dsde plot`: reports and pictures again, from results.json alone. Imports no torch."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from dsde.bench import drawing, plots
from dsde.bench.files import PLOTS, make_folder, write_files
from dsde.bench.results import load_results
from dsde.bench.summary import summarise
from dsde.core.errors import InvalidInput


def run_plot(path: Path, out: Path | None, picture_format: str) -> None:
    if picture_format not in ("svg", "png"):
        raise InvalidInput(f"format must be svg or png, not {picture_format!r}")
    drawing.require_matplotlib()
    results = load_results(path)
    folder = path.parent if out is None else out
    make_folder(folder)
    write_files(results, folder)
    if picture_format == "png":
        for name, figure in plots.draw(results, summarise(results)).items():
            (folder / PLOTS / f"{name}.png").write_bytes(drawing.to_png(figure))
    console = Console(soft_wrap=True)
    for file in [folder / "report.html", *sorted((folder / PLOTS).glob(f"*.{picture_format}"))]:
        console.print(str(file), highlight=False)
