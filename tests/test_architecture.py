"""The layers: a package knows the ones below it and nothing above; and policies can be used without torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import dsde

ROOT = Path(dsde.__file__).parent
LAYERS = [
    *("core", "policies", "simulation", "device", "models", "sampling", "drafting", "verification", "engine"),
    *("server", "bench", "integrations", "cli"),
]
"""from the bottom up"""
ALLOWED = {name: set(LAYERS[: LAYERS.index(name) + 1]) for name in LAYERS}
ALLOWED["device"] -= {"policies"}
ALLOWED["models"] -= {"policies"}
for name in LAYERS[LAYERS.index("simulation") + 1 : -1]:
    ALLOWED[name] -= {"simulation"}
ALLOWED["sampling"] -= {"policies", "models"}
ALLOWED["drafting"] -= {"policies"}
ALLOWED["verification"] -= {"policies"}
ALLOWED["bench"] -= {"server"}
ALLOWED["integrations"] = {"core", "policies", "integrations"}
ALLOWED["cli"] -= {"integrations"}


def imported_packages(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("dsde."):
            names.add(node.module.split(".")[1])
        elif isinstance(node, ast.Import):
            names |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("dsde.")}
    return names


def test_dependencies_point_downwards() -> None:
    folders = {path.name for path in ROOT.iterdir() if path.is_dir() and any(path.glob("*.py"))}
    assert folders == set(LAYERS)
    for folder in LAYERS:
        for path in (ROOT / folder).rglob("*.py"):
            assert imported_packages(path) <= ALLOWED[folder], path


def test_policies_need_no_torch() -> None:
    code = "import sys, dsde.policies; assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_plugin_needs_vllm_only_where_vllm_calls_it() -> None:
    code = "import sys; from dsde.integrations.vllm import graphs, plugin, running; assert 'vllm' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_public_names() -> None:
    for name in dsde.__all__:
        assert hasattr(dsde, name), name
    version = subprocess.run([sys.executable, "-m", "dsde", "--version"], capture_output=True, text=True, check=True)
    assert version.stdout == f"dsde {dsde.__version__}\n"
