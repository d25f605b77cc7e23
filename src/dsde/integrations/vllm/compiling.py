"""Compiles beforehand what vLLM's drafting would compile when it meets a size for the first time.

Small kernels prepare a draft's first pass. Triton compiles each of them anew for up to 1, 2, 4 and so on tokens of a
request, and for one, for multiples of 16 and for other numbers of whatever is counted. With one fixed length few of
these are ever met, all in the first steps. Lengths that change, and a draft that reads what it missed, meet them one
after another, a tenth of a second each and more: requests would wait, and a policy would take that for the price of a
draft.
"""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import torch

from dsde.integrations.vllm.draft_graphs import uniform_metadata

BATCHES = (1, 3, 16)
"""one, any other number, a multiple of 16"""
CHANGES = ((3, 2), (1, 1), (1, 2), (2, 1), (2, 2))
"""requests of a step and of the one before: of two numbers above 1 any others will do, if at first they differ. The
last is for limits below 4, where numbers are taken to be the limit"""
LARGEST_BLOCK = 256
"""tokens of a request up to which vLLM has kernels of different sizes"""


@torch.inference_mode()  # as in a step: tensors that are made outside are of another kind
def compile_all(runner: Any, longest: int) -> None:
    """For verifications of up to so many tokens of a request, and for reading any number. Nobody must be served yet."""
    drafter, max_num_seqs = runner.drafter, runner.scheduler_config.max_num_seqs
    block_table = runner.input_batch.block_table[drafter.kv_cache_gid].get_device_tensor(max_num_seqs)
    # Behind the longest verification a draft reads one more token of each request.
    most = min(max_num_seqs, drafter.max_num_tokens // (longest + 1))
    for num_reqs in (num for num in BATCHES if num <= most):
        table = block_table[:num_reqs]
        if longest > 1:
            _judge(runner, num_reqs, longest - 1)
        for num_tokens in range(1, longest + 1):
            _draft(runner, num_tokens, longest - 1, table)
        size = 2
        while size <= LARGEST_BLOCK and num_reqs * size <= drafter.max_num_tokens:
            first = _first_pass(runner, size - 1, table, torch.zeros(num_reqs, dtype=torch.int32, device=runner.device))
            drafter.set_inputs_first_pass(cad=first.pop("common_attn_metadata"), **first)
            size *= 2
    if getattr(runner, "use_async_spec_decode", False):
        for num_reqs, num_before in CHANGES:
            if max(num_reqs, num_before) <= max_num_seqs:
                _correct(runner, num_reqs, num_before)
    if runner.device.type == "cuda":
        torch.cuda.synchronize()


def _correct(runner: Any, num_reqs: int, num_before: int) -> None:
    """Positions behind a verification that the host has yet to hear of, as vLLM finds them on the device; nobody is in
    it. This is half a second when the first drafts are verified."""
    from vllm.v1.spec_decode import utils

    correct = getattr(utils, "update_num_computed_tokens_for_batch_change", None)
    if correct is None:
        return
    correct(
        runner.num_computed_tokens,
        runner.num_accepted_tokens.gpu[:num_reqs],
        runner.prev_positions.gpu[:num_reqs].fill_(-1),
        torch.zeros(num_before, dtype=torch.int32, device=runner.device),
        runner.prev_num_draft_tokens.gpu,
        runner.input_batch.num_computed_tokens_cpu_tensor[:num_reqs].to(runner.device),
    )


def _judge(runner: Any, num_reqs: int, num_drafted: int) -> None:
    """A verdict on so many drafted tokens of each request, nobody drawing at random."""
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

    drafts = SpecDecodeMetadata.make_dummy([[0] * num_drafted] * num_reqs, device=runner.device)
    vocab_size = runner.input_batch.vocab_size
    logits = torch.zeros((num_reqs * (num_drafted + 1), vocab_size), dtype=runner.dtype, device=runner.device)
    runner.rejection_sampler(drafts, None, logits, _greedy(runner))


def _draft(runner: Any, num_tokens: int, num_drafted: int, block_table: torch.Tensor) -> None:
    """As behind a verification of so many tokens of each request. Block 0, which it writes to, is nobody's."""
    drafter, device, num_reqs = runner.drafter, runner.device, len(block_table)
    nobody = SimpleNamespace(num_reqs=0, req_ids=[], vocab_size=runner.input_batch.vocab_size)
    sampled = torch.zeros((num_reqs, num_tokens), dtype=torch.int32, device=device)
    mask = runner.discard_request_mask.gpu
    next_token_ids, counts = drafter.prepare_next_token_ids_padded(sampled, {}, nobody, mask)
    first = _first_pass(runner, num_tokens, block_table, next_token_ids)
    if num_tokens > 1:
        ends = torch.arange(1, num_reqs + 1, dtype=torch.int32, device=device) * (num_tokens - 1)
        found = drafter.prepare_inputs_padded(
            first["common_attn_metadata"], SimpleNamespace(cu_num_draft_tokens=ends), counts
        )
        first["common_attn_metadata"], first["token_indices_to_sample"], first["num_rejected_tokens_gpu"] = found
    drafter.propose(num_drafted, sampling_metadata=_greedy(runner), **first)


def _greedy(runner: Any) -> Any:
    # Of a batch without requests vLLM says both.
    return dataclasses.replace(runner.input_batch.sampling_metadata, all_greedy=True, all_random=False)


def _first_pass(
    runner: Any, num_tokens: int, block_table: torch.Tensor, next_token_ids: torch.Tensor
) -> dict[str, Any]:
    """What vLLM is told of a draft's first pass over so many tokens of each request."""
    total = len(block_table) * num_tokens
    return {
        "target_token_ids": torch.zeros(total, dtype=torch.int32, device=runner.device),
        "target_positions": torch.zeros(total, dtype=torch.int64, device=runner.device),
        "target_hidden_states": None,
        "next_token_ids": next_token_ids,
        "token_indices_to_sample": None,
        "common_attn_metadata": uniform_metadata(runner.drafter, num_tokens, block_table),
        "num_rejected_tokens_gpu": None,
    }
