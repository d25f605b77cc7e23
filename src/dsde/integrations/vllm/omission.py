"""What vLLM does for its draft in every step, left out of those in which nobody drafts and no draft is verified.

Such a step then goes as in vLLM without speculation. Knows what vLLM's model runner asks of itself to see whether it
speculates; knows nothing of lengths.
"""

from __future__ import annotations

from typing import Any


class Omission:
    """A model runner that can forget its draft for a call."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._groups: list[list[Any]] | None = None
        """found at first use, when the runner has its KV cache"""
        # The state of a recurrent target lies elsewhere for whoever may have drafted.
        self.is_possible = runner.speculative_config.method == "draft_model" and not runner.model_config.is_hybrid

    def call(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """A method of the runner, which believes meanwhile that there is no draft."""
        runner = self._runner
        if self._groups is None:
            self._groups = find_target_groups(runner)
        speculative, groups = runner.speculative_config, runner.attn_groups
        runner.speculative_config, runner.attn_groups = None, self._groups
        try:
            return original(runner, *args, **kwargs)
        finally:
            runner.speculative_config, runner.attn_groups = speculative, groups


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
