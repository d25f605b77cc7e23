"""A short edition of `benchmarks/serve.py load`: many clients, random requests, some leaving, SIGTERM in mid-load."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dsde.models.embedded import embedded_target_path

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "serve.py"


@pytest.mark.weights
@pytest.mark.skipif(embedded_target_path() is None, reason="the embedded weights are not on this machine")
def test_load() -> None:
    sizes = ["--seconds", "10", "--settle", "0", "--clients", "24", "--max-num-seqs", "20", "--kv-cache-mb", "64"]
    command = [sys.executable, str(SCRIPT), "load", *sizes]
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}  # as every test: two collapse beside a busy neighbour
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=one_thread)
    assert result.returncode == 0, result.stdout + result.stderr
