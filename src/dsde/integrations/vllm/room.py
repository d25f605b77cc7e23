"""Room for deep calls in vLLM's own loops, which the plugin makes deeper: see core/call_room.py.

Without it a step in which nobody drafts may take some percent longer than without the plugin, and much longer where an
edge falls into what is called for every request. Knows nothing of what the loops do.
"""

from __future__ import annotations

import sys
from typing import Any

from dsde.core.call_room import call_with_room
from dsde.integrations.vllm import hooks

CORE = "vllm.v1.engine.core"
LOOPS = (
    hooks.Hook(CORE, "EngineCoreProc", "run_busy_loop", ()),
    hooks.Hook(CORE, "DPEngineCoreProc", "run_busy_loop", ()),
    hooks.Hook("vllm.v1.executor.multiproc_executor", "WorkerProc", "worker_busy_loop", ()),
)
"""of an engine's own process, and of a worker's"""


def find_offline_loop() -> hooks.Hook | None:
    """Of `vllm.LLM` whose engine lives in its own process; None: nobody uses that."""
    offline = sys.modules.get("vllm.entrypoints.llm")
    owners = offline.LLM.__mro__ if offline is not None else ()
    owner = next((one for one in owners if "_run_engine" in one.__dict__), None)
    return None if owner is None else hooks.Hook(owner.__module__, owner.__name__, "_run_engine", ())


def run(original: Any, *args: Any, **kwargs: Any) -> Any:
    return call_with_room(original, *args, **kwargs)


def install() -> None:
    offline = find_offline_loop()
    loops = LOOPS if offline is None else (*LOOPS, offline)
    hooks.wrap_if_known(dict.fromkeys(loops, run), lost="steps may take longer than they have to")
