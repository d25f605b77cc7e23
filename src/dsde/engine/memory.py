"""How many KV blocks there is memory for. Target and draft share one budget, a block of each at a time."""

from __future__ import annotations

import os

import torch

from dsde.core.errors import InvalidInput
from dsde.engine.config import EngineConfig
from dsde.models.batch import BLOCK_SIZE
from dsde.models.decoder import Decoder

_SHARE_OF_FREE_MEMORY = 0.25
_MOST_ON_CPU = 2 << 30


def count_blocks(target: Decoder, draft_bytes_per_block: int, config: EngineConfig) -> int:
    per_block = target.config.kv_bytes_per_token(target.dtype) * BLOCK_SIZE + draft_bytes_per_block
    budget = config.kv_cache_bytes or _default_budget(target.device)
    if budget < per_block:
        raise InvalidInput(
            f"kv_cache_bytes must be at least {per_block} (one block of {BLOCK_SIZE} tokens), got {budget}."
        )
    # More than every sequence at full length could never be used.
    longest = config.max_model_len or target.config.max_position_embeddings
    useful = config.max_num_seqs * (-(-longest // BLOCK_SIZE))
    return min(budget // per_block, useful)


def _default_budget(device: torch.device) -> int:
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free * 0.9)
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(int(free * _SHARE_OF_FREE_MEMORY), _MOST_ON_CPU)
