"""A short edition of `benchmarks/serve.py load`: many clients, random requests, some leaving, SIGTERM in mid-load."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dsde.models.embedded import embedded_target_path

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "serve.py"


@pytest.mark.weights
@pytest.mark.skipif(embedded_target_path() is None, reason="the embedded weights are not on this machine")
def test_load() -> None:
    sizes = ["--seconds", "15", "--settle", "0", "--clients", "24", "--max-num-seqs", "16", "--kv-cache-mb", "64"]
    result = subprocess.run([sys.executable, str(SCRIPT), "load", *sizes], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
