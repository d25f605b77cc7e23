"""Settings of an engine, with their defaults in one place."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dsde.core.errors import InvalidInput
from dsde.verification.synthetic import SyntheticRates, by_kind


@dataclass(frozen=True)  # without slots: `LLM` takes its own defaults from the class
class EngineConfig:
    max_num_seqs: int = 256
    """sequences that run at once"""
    max_num_batched_tokens: int | None = None
    """tokens one target pass reads, drafted ones aside; longer prompts are read in chunks; None: 512 on a CPU, 2048 on
    a GPU"""
    max_model_len: int | None = None
    """longest sequence, prompt and output together; None: what the model and the KV memory allow"""
    kv_cache_bytes: int | None = None
    """KV memory of target and draft together; None: on a CPU a quarter of the free memory, at most 2 GiB; on a
    GPU what is free, less what a step works with"""
    seed: int = 0
    """for requests that bring none of their own"""
    synthetic_acceptance: SyntheticRates | None = None
    """for benchmarks on random weights: a drafted token stands with this probability, by its place in the draft, and
    whatever the models say, so that the text is nobody's; of several tuples of them every request has one, by its seed
    (`rates_of`); None: lossless"""

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "kv_cache_bytes"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise InvalidInput(f"{name} must be a whole number of at least 1, got {value!r}.")
        rates = self.synthetic_acceptance
        if rates is not None and not (rates and all(row and all(0 <= r <= 1 for r in row) for row in by_kind(rates))):
            raise InvalidInput(f"synthetic_acceptance must hold probabilities, got {rates!r}.")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise InvalidInput(f"seed must be a whole number, got {self.seed!r}.")

    def tokens_per_pass(self, device: torch.device) -> int:
        return self.max_num_batched_tokens or (2048 if device.type == "cuda" else 512)
