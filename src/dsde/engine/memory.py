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
_SHARE_OF_GPU = 0.95
_GRAPHS_AND_LIBRARIES = 1 << 29
_LOGIT_ROWS_PER_SEQUENCE = 18
"""Rows of logits that a step may have at hand, the target's and the draft's, at a length of 8."""


def count_blocks(target: Decoder, draft_bytes_per_block: int, config: EngineConfig) -> int:
    per_block = target.config.kv_bytes_per_token(target.dtype) * BLOCK_SIZE + draft_bytes_per_block
    budget = config.kv_cache_bytes or _default_budget(target, config)
    # More than every sequence at full length could never be used.
    longest = config.max_model_len or target.config.max_position_embeddings
    useful = config.max_num_seqs * (-(-longest // BLOCK_SIZE))
    budget = min(budget, useful * per_block)
    if target.device.type == "cuda":
        _check_gpu(target, config, budget, per_block)
    elif budget < per_block:
        raise InvalidInput(
            f"kv_cache_bytes must be at least {per_block} (one block of {BLOCK_SIZE} tokens), got {budget}."
        )
    return budget // per_block


def _default_budget(target: Decoder, config: EngineConfig) -> int:
    if target.device.type == "cuda":
        return max(0, _room_on_gpu(target, config))
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(int(free * _SHARE_OF_FREE_MEMORY), _MOST_ON_CPU)


def _room_on_gpu(target: Decoder, config: EngineConfig) -> int:
    """What is free once the largest step has what it works with."""
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(target.device)
    shape = target.config
    activations = config.tokens_per_pass(target.device) * (8 * shape.hidden_size + 4 * shape.intermediate_size)
    logits = _LOGIT_ROWS_PER_SEQUENCE * config.max_num_seqs * shape.vocab_size
    workspace = (activations + logits) * target.dtype.itemsize
    return int(free * _SHARE_OF_GPU) - workspace - _GRAPHS_AND_LIBRARIES


def _check_gpu(target: Decoder, config: EngineConfig, budget: int, per_block: int) -> None:
    room = _room_on_gpu(target, config) if config.kv_cache_bytes else budget
    if per_block <= budget <= room:
        return
    free, total = torch.cuda.mem_get_info(target.device)
    fits = f"{room // per_block * BLOCK_SIZE} tokens (kv_cache_bytes={room})" if room >= per_block else "nothing"
    raise InvalidInput(
        f"The KV cache needs at least {max(budget, per_block) / 2**30:.2f} GiB, but of the GPU's "
        f"{total / 2**30:.1f} GiB {free / 2**30:.1f} are free, some of which a step works with: {fits} would fit."
    )


def describe_shortage(device: torch.device, config: EngineConfig) -> str:
    """What to say when a step has run out of memory all the same."""
    free, total = torch.cuda.mem_get_info(device)
    tokens = config.tokens_per_pass(device)
    return (
        f"A step ran out of GPU memory: of {total / 2**30:.1f} GiB {free / 2**30:.2f} were free. Lower "
        f"max_num_batched_tokens (now {tokens}), max_num_seqs (now {config.max_num_seqs}) or kv_cache_bytes."
    )
