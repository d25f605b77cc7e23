"""Cores of the host that a benchmark of a GPU keeps to, so that all that is compared runs on the same ones.

Where the host is about as busy as the GPU, what else runs on the core of the thread that serves decides about its
speed, for seconds. Knows nothing of what is measured.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

NUM_CORES = 4
"""one for the thread that serves, the others for all other threads of the process"""


def keep_to_cores() -> list[int]:
    """The same for every process: the last for the thread that serves, the others for all its other threads. Those that
    there are not yet are moved the next time. On a machine with few cores, or another system, nobody is moved, and
    nothing returned."""
    if not hasattr(os, "sched_setaffinity"):
        return []
    # What this process itself may use is what it was moved to the last time.
    cores = sorted(core for core in os.sched_getaffinity(os.getppid()) if is_first_thread(core))[-NUM_CORES:]
    if len(cores) < NUM_CORES:
        return []
    for thread in map(int, os.listdir("/proc/self/task")):
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.sched_setaffinity(thread, {cores[-1]} if thread == os.getpid() else set(cores[:-1]))
    return cores


def is_first_thread(core: int) -> bool:
    """Or the only one, of those that share a core of the machine."""
    try:
        siblings = Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list").read_text()
    except OSError:
        return True
    return int(siblings.replace("-", ",").split(",")[0]) == core
