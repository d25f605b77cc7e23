"""Mends what vLLM 0.32's build for CPUs gets wrong, with or without the plugin, so that the plugin can be tested."""

from __future__ import annotations

import pytest
import torch


def mend_temperatures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Verification divides logits by each request's temperature, which `expand_batch_to_tokens` spreads over tokens.
    The kernel for CPUs writes into a converted copy, and what comes back is memory that nobody has written."""
    from vllm.v1.sample import rejection_sampler

    def expand(
        x: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
    ) -> torch.Tensor:
        spread = torch.repeat_interleave(x, torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1)))
        assert len(spread) == num_tokens
        return torch.where(spread == replace_from, torch.full_like(spread, replace_to), spread)

    monkeypatch.setattr(rejection_sampler, "expand_batch_to_tokens", expand)
