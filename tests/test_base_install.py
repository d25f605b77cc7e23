"""What is installed without extras is enough on a CPU: nothing that it needs imports Triton."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("module", ["dsde.engine.async_llm", "dsde.cli.app"])
def test_a_cpu_needs_no_triton(module: str) -> None:
    script = f"import sys; sys.modules['triton'] = None; import {module}; import dsde; dsde.LLM"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
