"""Compiles beforehand what vLLM's drafting would compile when it meets a size for the first time.

Small kernels prepare a draft's first pass. Triton compiles each of them anew for up to 1, 2, 4 and so on tokens of a
request, and for one, for multiples of 16 and for other numbers of whatever is counted. With one fixed length few of
these are ever met, all in the first steps. Lengths that change, and a draft that reads what it missed, meet them one
after another, a tenth of a second each: requests would wait, and a policy would take that for the price of a draft.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from dsde.integrations.vllm.draft_graphs import uniform_metadata

BATCHES = (1, 3, 16)
"""one, any other number, a multiple of 16"""
LARGEST_BLOCK = 256
"""tokens of a request up to which vLLM has kernels of different sizes"""


def compile_all(runner: Any, longest: int) -> None:
    """For verifications of up to so many tokens of a request, and for reading any number."""
    drafter = runner.drafter
    most = min(max(BATCHES), runner.scheduler_config.max_num_seqs)
    block_table = runner.input_batch.block_table[drafter.kv_cache_gid].get_device_tensor(most)
    for num_reqs in (num for num in BATCHES if num <= most):
        table = block_table[:num_reqs]
        for num_tokens in range(1, longest + 1):
            _follow(runner, num_tokens, table)
        size = 2
        while size <= LARGEST_BLOCK and num_reqs * size <= drafter.max_num_tokens:
            _read(runner, size - 1, table, torch.zeros(num_reqs, dtype=torch.int32, device=runner.device))
            size *= 2
    torch.accelerator.synchronize()


def _follow(runner: Any, num_tokens: int, block_table: torch.Tensor) -> None:
    """What the draft does first behind a verification of so many tokens of each request."""
    drafter, device, num_reqs = runner.drafter, runner.device, len(block_table)
    nobody = SimpleNamespace(num_reqs=0, req_ids=[], vocab_size=runner.input_batch.vocab_size)
    sampled = torch.zeros((num_reqs, num_tokens), dtype=torch.int32, device=device)
    next_token_ids, counts = drafter.prepare_next_token_ids_padded(sampled, {}, nobody, runner.discard_request_mask.gpu)
    rejected = None
    if num_tokens > 1:
        ends = torch.arange(1, num_reqs + 1, dtype=torch.int32, device=device) * (num_tokens - 1)
        _, _, rejected = drafter.prepare_inputs_padded(
            uniform_metadata(drafter, num_tokens, block_table), SimpleNamespace(cu_num_draft_tokens=ends), counts
        )
    _read(runner, num_tokens, block_table, next_token_ids, rejected)


def _read(
    runner: Any,
    num_tokens: int,
    block_table: torch.Tensor,
    next_token_ids: torch.Tensor,
    rejected: torch.Tensor | None = None,
) -> None:
    """What a draft's first pass over so many tokens of each request begins with. The pass itself is not made."""
    total = len(block_table) * num_tokens
    runner.drafter.set_inputs_first_pass(
        target_token_ids=torch.zeros(total, dtype=torch.int32, device=runner.device),
        next_token_ids=next_token_ids,
        target_positions=torch.zeros(total, dtype=torch.int64, device=runner.device),
        target_hidden_states=None,
        token_indices_to_sample=None,
        cad=uniform_metadata(runner.drafter, num_tokens, block_table),
        num_rejected_tokens_gpu=rejected,
    )
