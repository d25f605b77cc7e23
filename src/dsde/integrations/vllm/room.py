"""Room for deep calls in vLLM's own loops, which the plugin makes deeper: see core/call_room.py.

Without it a step in which nobody drafts may take some percent longer than without the plugin, and much longer where an
edge falls into what is called for every request. Knows nothing of what the loops do.
"""

from __future__ import annotations

import functools
import logging
import sys

from dsde.core.call_room import call_with_room
from dsde.integrations.vllm import hooks

logger = logging.getLogger("vllm.dsde")

CORE = "vllm.v1.engine.core"
LOOPS = (
    hooks.Hook(CORE, "EngineCoreProc", "run_busy_loop", ()),
    hooks.Hook(CORE, "DPEngineCoreProc", "run_busy_loop", ()),
    hooks.Hook("vllm.v1.executor.multiproc_executor", "WorkerProc", "worker_busy_loop", ()),
)
"""of an engine's own process, and of a worker's"""
OFFLINE_LOOP = hooks.Hook("vllm.entrypoints.llm", "LLM", "_run_engine", ())
"""of an engine in the process of whoever uses it"""


def find_owner(loop: hooks.Hook) -> type | None:
    """The class that has it, which may be one that the named one inherits from; None: there is no such loop."""
    named = getattr(sys.modules[loop.module], loop.owner, None)
    return next((one for one in getattr(named, "__mro__", ()) if loop.name in vars(one)), None)


def install() -> None:
    """Each by itself, where its module is loaded: a loop that nobody has imported does not run here."""
    for loop in (*LOOPS, OFFLINE_LOOP):
        if loop.module not in sys.modules:
            continue
        owner = find_owner(loop)
        if owner is None:
            _say(loop.path)
        else:
            hooks.wrap(hooks.Hook(owner.__module__, owner.__qualname__, loop.name, ()), call_with_room)


@functools.cache
def _say(path: str) -> None:
    logger.warning("dsde: %s is not there; steps may take longer than they have to", path)
