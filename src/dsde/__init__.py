"""dsde: speculative decoding that tunes itself."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from dsde.core.errors import DownloadError, DsdeError, InvalidInput, ModelError
from dsde.core.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput, StepRecord, StreamChunk
from dsde.core.params import SamplingParams

# Threads of GNU OpenMP, which torch uses on Linux, wait for each other by spinning for a long time; beside any other
# busy process a step then takes tens of times as long. Giving up sooner costs nothing on a quiet machine. The setting
# is read when torch is first imported, so it must be made here.
os.environ.setdefault("GOMP_SPINCOUNT", "20000")

if TYPE_CHECKING:
    from dsde.engine.async_llm import AsyncLLM
    from dsde.engine.llm import LLM

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "DownloadError",
    "DsdeError",
    "InvalidInput",
    "Logprob",
    "ModelError",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "StepRecord",
    "StreamChunk",
    "__version__",
]


def __getattr__(name: str) -> Any:
    # Importing torch takes seconds: whoever wants only policies or a version need not wait for it.
    if name == "LLM":
        from dsde.engine.llm import LLM

        return LLM
    if name == "AsyncLLM":
        from dsde.engine.async_llm import AsyncLLM

        return AsyncLLM
    raise AttributeError(f"module 'dsde' has no attribute {name!r}")
