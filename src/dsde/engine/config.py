"""Settings of an engine, with their defaults in one place."""

from __future__ import annotations

from dataclasses import dataclass

from dsde.core.errors import InvalidInput


@dataclass(frozen=True)  # without slots: `LLM` takes its own defaults from the class
class EngineConfig:
    max_num_seqs: int = 256
    """sequences that run at once"""
    max_num_batched_tokens: int = 512
    """tokens one target pass reads, drafted ones aside; longer prompts are read in chunks"""
    max_model_len: int | None = None
    """longest sequence, prompt and output together; None: what the model and the KV memory allow"""
    kv_cache_bytes: int | None = None
    """KV memory of target and draft together; None: a quarter of the free memory, at most 2 GiB on a CPU"""
    seed: int = 0
    """for requests that bring none of their own"""

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "kv_cache_bytes"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise InvalidInput(f"{name} must be a whole number of at least 1, got {value!r}.")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise InvalidInput(f"seed must be a whole number, got {self.seed!r}.")
