"""What vLLM prepares for speculation in every step, left out where nobody drafts and the draft reads nothing.

Such a step is then prepared as by vLLM without speculation. Knows how vLLM prepares a step; knows nothing of lengths.
"""

from __future__ import annotations

from typing import Any

from dsde.integrations.vllm import hooks
from dsde.integrations.vllm.running import adapter_of

GROUPS = "dsde_attention_groups"


def prepare_inputs(original: Any, runner: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
    """Without drafts to verify, no metadata of drafts: 0.32 makes some wherever there is a draft at all."""
    # The state of a recurrent target lies elsewhere for whoever may have drafted.
    if not _is_plain(runner) or scheduler_output.scheduled_spec_decode_tokens or runner.model_config.is_hybrid:
        return original(runner, scheduler_output, *args, **kwargs)
    speculative, runner.speculative_config = runner.speculative_config, None
    try:
        return original(runner, scheduler_output, *args, **kwargs)
    finally:
        runner.speculative_config = speculative


def build_attention(original: Any, runner: Any, *args: Any, **kwargs: Any) -> Any:
    """Metadata for the target's layers alone: the draft's are read by nobody if it does not run."""
    if not _is_plain(runner):
        return original(runner, *args, **kwargs)
    if not hasattr(runner, GROUPS):
        setattr(runner, GROUPS, find_target_groups(runner))
    groups, runner.attn_groups = runner.attn_groups, getattr(runner, GROUPS)
    try:
        return original(runner, *args, **kwargs)
    finally:
        runner.attn_groups = groups


def _is_plain(runner: Any) -> bool:
    adapter = adapter_of(runner)
    return adapter is not None and adapter.leaves_draft_out


def find_target_groups(runner: Any) -> list[list[Any]]:
    """vLLM's groups of attention layers, for each part of the KV cache, but for those of the draft alone."""
    if runner.vllm_config.kv_transfer_config is not None:
        return list(runner.attn_groups)  # a connector may look at the metadata of any layer
    drafting = {name for group in runner.drafter.draft_attn_groups for name in group.layer_names}
    found = []
    for groups in runner.attn_groups:
        num = len(groups)
        # Only from the end: vLLM knows groups by their places.
        while num and drafting.issuperset(groups[num - 1].layer_names):
            num -= 1
        found.append(groups[:num])
    return found


def install() -> None:
    hooks.wrap_if_known(
        {hooks.PREPARE_INPUTS: prepare_inputs, hooks.BUILD_ATTENTION: build_attention},
        lost="steps without drafts are prepared as if there were some",
    )
