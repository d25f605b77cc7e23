"""The places in vLLM where the plugin takes part, how each must look, and how one is wrapped.

vLLM promises none of them. They are compared with what is expected before anything is touched: names and parameters.
If one differs, nothing is wrapped at all and vLLM goes on as if the plugin were not there.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

logger = logging.getLogger("vllm.dsde")

Wrapper = Callable[..., Any]
"""called with the wrapped function first, then as that"""


@dataclass(frozen=True)
class Hook:
    module: str
    owner: str
    name: str
    parameters: tuple[str, ...]
    """that it must have, in this order and first, `self` left out"""

    @property
    def path(self) -> str:
        return f"{self.module}.{self.owner}.{self.name}"

    def holder(self) -> Any:
        return getattr(importlib.import_module(self.module), self.owner)


SCHEDULER = "vllm.v1.core.sched.scheduler"
ASYNC_SCHEDULER = "vllm.v1.core.sched.async_scheduler"
RUNNER = "vllm.v1.worker.gpu_model_runner"
PROPOSER = "vllm.v1.spec_decode.llm_base_proposer"
DISPATCHER = "vllm.v1.cudagraph_dispatcher"

AFTER_SCHEDULE = Hook(SCHEDULER, "Scheduler", "_update_after_schedule", ("scheduler_output",))
AFTER_SCHEDULE_ASYNC = Hook(ASYNC_SCHEDULER, "AsyncScheduler", "_update_after_schedule", ("scheduler_output",))
UPDATE_FROM_OUTPUT = Hook(SCHEDULER, "Scheduler", "update_from_output", ("scheduler_output", "model_runner_output"))
UPDATE_DRAFTS = Hook(SCHEDULER, "Scheduler", "update_draft_token_ids", ("draft_token_ids",))
EXECUTE = Hook(RUNNER, "GPUModelRunner", "execute_model", ("scheduler_output",))
SAMPLE = Hook(RUNNER, "GPUModelRunner", "_sample", ("logits", "spec_decode_metadata"))
SAMPLE_TOKENS = Hook(RUNNER, "GPUModelRunner", "sample_tokens", ("grammar_output",))
PROPOSE_DRAFTS = Hook(
    *(RUNNER, "GPUModelRunner", "propose_draft_token_ids"),
    (
        *("scheduler_output", "sampled_token_ids", "sampling_metadata", "hidden_states", "sample_hidden_states"),
        *("aux_hidden_states", "spec_decode_metadata", "common_attn_metadata", "slot_mappings"),
    ),
)
GET_OUTPUT = Hook(RUNNER, "AsyncGPUModelRunnerOutput", "get_output", ())
PROPOSE = Hook(
    *(PROPOSER, "SpecDecodeBaseProposer", "propose"),
    (
        *("num_speculative_tokens", "target_token_ids", "target_positions", "target_hidden_states", "next_token_ids"),
        *("token_indices_to_sample", "common_attn_metadata", "sampling_metadata"),
    ),
)
SAMPLE_DRAFT = Hook(PROPOSER, "SpecDecodeBaseProposer", "_sample_draft_tokens", ("hidden_states", "sampling_metadata"))

NEEDED = (
    *(AFTER_SCHEDULE, AFTER_SCHEDULE_ASYNC, UPDATE_FROM_OUTPUT, UPDATE_DRAFTS, EXECUTE, SAMPLE, SAMPLE_TOKENS),
    *(PROPOSE_DRAFTS, GET_OUTPUT, PROPOSE, SAMPLE_DRAFT),
)
"""without any one of these the plugin cannot work"""

DETERMINE_BATCH = Hook(
    *(RUNNER, "GPUModelRunner", "_determine_batch_execution_and_padding"),
    ("num_tokens", "num_reqs", "num_scheduled_tokens_np", "max_num_scheduled_tokens"),
)
CAPTURE = Hook(RUNNER, "GPUModelRunner", "_capture_cudagraphs", ("batch_descriptors", "cudagraph_runtime_mode"))
DISPATCH = Hook(DISPATCHER, "CudagraphDispatcher", "dispatch", ("num_tokens", "uniform_decode"))

FOR_GRAPHS = (DETERMINE_BATCH, CAPTURE, DISPATCH)
"""without these lengths below the largest have no CUDA graph of their own"""


def find_changes(hooks: Iterable[Hook]) -> list[str]:
    """What is not as it must be, one phrase each."""
    changes = []
    for hook in hooks:
        try:
            function = vars(hook.holder())[hook.name]  # of the class itself: what it inherits is another's to wrap
        except (ImportError, AttributeError, KeyError):
            changes.append(f"{hook.path} is not there")
            continue
        found = tuple(inspect.signature(function).parameters)[1:]
        if found[: len(hook.parameters)] != hook.parameters:
            changes.append(f"{hook.path} takes ({', '.join(found)}) and not ({', '.join(hook.parameters)})")
    return changes


def wrap(hook: Hook, wrapper: Wrapper) -> None:
    """Let `wrapper` be called instead, once however often this is asked for."""
    holder = hook.holder()
    original = holder.__dict__[hook.name]
    if getattr(original, "is_dsde", False):
        return

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    wrapped.is_dsde = True  # type: ignore[attr-defined]
    setattr(holder, hook.name, wrapped)


def wrap_if_known(wrappers: dict[Hook, Wrapper], lost: str) -> None:
    """All of them, or none if vLLM is not as expected at one, and say what is lost by that."""
    changes = find_changes(wrappers)
    if changes:
        logger.warning("dsde: %s: %s", lost, "; ".join(changes))
        return
    for hook, wrapper in wrappers.items():
        wrap(hook, wrapper)
