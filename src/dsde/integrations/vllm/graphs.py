"""CUDA graphs of the target's whole pass for every length that all requests of a batch may share, 0 included.

vLLM captures them for its one fixed length; any other runs in pieces, with the attention of every layer launched by
itself. A policy that turns drafting off, or chooses shorter lengths, would pay for that at every step. Those of the
draft, of which vLLM has none, are captured at the same time: draft_graphs.py.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from bisect import bisect_left
from typing import Any

from dsde.integrations.vllm import hooks
from dsde.integrations.vllm.compiling import compile_all
from dsde.integrations.vllm.draft_graphs import DraftGraphs, can_capture, record_cuda_graph

logger = logging.getLogger("vllm.dsde")

BATCH_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512)
GRAPHS = "dsde_graphs"


class LengthGraphs:
    """Which graphs there are, and which of them a batch fits into. Belongs to vLLM's dispatcher of graphs."""

    def __init__(self, mode: Any) -> None:
        self.mode = mode
        """vLLM's name for graphs of whole passes"""
        self.batch: tuple[int, int] | None = None
        """tokens of each request and number of requests of the batch that is being dispatched; None: they differ"""
        self._found: dict[int, tuple[list[int], list[Any]]] = {}
        """by tokens of each request: numbers of requests, ascending, and vLLM's descriptors of the graphs"""

    def add(self, query_len: int, descriptors: list[Any]) -> None:
        ordered = sorted(descriptors, key=lambda descriptor: int(descriptor.num_reqs))
        self._found[query_len] = ([descriptor.num_reqs for descriptor in ordered], ordered)

    def clear(self) -> None:
        self._found.clear()

    def find(self) -> Any:
        """Descriptor of the smallest graph that the batch fits into; None: there is none."""
        if self.batch is None:
            return None
        query_len, num_reqs = self.batch
        sizes, descriptors = self._found.get(query_len, ([], []))
        place = bisect_left(sizes, num_reqs)
        return descriptors[place] if place < len(sizes) else None


def plan_sizes(query_len: int, max_num_seqs: int, max_num_tokens: int) -> list[int]:
    """Numbers of requests to capture for."""
    most = min(max_num_seqs, max_num_tokens // query_len)
    sizes = [size for size in BATCH_SIZES if size <= most]
    return sizes if not sizes or sizes[-1] == most else [*sizes, most]


def capture(
    original: Any, runner: Any, batch_descriptors: Any, cudagraph_runtime_mode: Any, *args: Any, **kwargs: Any
) -> None:
    """vLLM captures its own graphs; then those for the other lengths, where it has any for whole passes."""
    original(runner, batch_descriptors, cudagraph_runtime_mode, *args, **kwargs)
    wanted = [descriptor for descriptor in batch_descriptors if descriptor.uniform and not descriptor.has_lora]
    if cudagraph_runtime_mode.name != "FULL" or not wanted or runner.lora_config or not runner.num_spec_tokens:
        return
    dispatcher, longest = runner.cudagraph_dispatcher, runner.uniform_decode_query_len
    graphs = LengthGraphs(cudagraph_runtime_mode)
    setattr(dispatcher, GRAPHS, graphs)
    max_num_tokens = dispatcher.compilation_config.max_cudagraph_capture_size
    num = 0
    try:
        for query_len in range(1, longest):
            sizes = plan_sizes(query_len, runner.scheduler_config.max_num_seqs, max_num_tokens)
            descriptors = [
                dataclasses.replace(wanted[0], num_tokens=size * query_len, num_reqs=size) for size in reversed(sizes)
            ]
            runner.uniform_decode_query_len = dispatcher.uniform_decode_query_len = query_len
            graphs.add(query_len, descriptors)
            original(runner, descriptors, cudagraph_runtime_mode, *args, **kwargs)
            num += len(descriptors)
    except Exception as error:
        graphs.clear()
        logger.warning("dsde: lengths below the largest go without CUDA graphs of whole passes: %s", error)
    else:
        logger.info("dsde: %d CUDA graphs for lengths 0 to %d", num, longest - 2)
    finally:
        runner.uniform_decode_query_len = dispatcher.uniform_decode_query_len = longest
    if can_capture(runner):
        _capture_drafts(runner, longest, max_num_tokens)
        _compile(runner, longest)


def _capture_drafts(runner: Any, longest: int, max_num_tokens: int) -> None:
    drafter = runner.drafter
    max_num_seqs = runner.scheduler_config.max_num_seqs
    block_table = runner.input_batch.block_table[drafter.kv_cache_gid].get_device_tensor(1)
    graphs = DraftGraphs(drafter, block_table, record_cuda_graph)
    try:
        # The first pass of a draft reads what the target has verified and the token that it added, others one token.
        for query_len in range(longest + 1, 0, -1):
            graphs.capture(query_len, plan_sizes(query_len, max_num_seqs, max_num_tokens))
    except Exception as error:
        logger.warning("dsde: the draft goes without CUDA graphs of whole passes: %s", error)
        return
    graphs.install()
    logger.info(
        "dsde: %d CUDA graphs of the draft, for up to %d tokens of each request", graphs.num_captured, longest + 1
    )


def _compile(runner: Any, longest: int) -> None:
    begin = time.perf_counter()
    try:
        compile_all(runner, longest)
    except Exception as error:
        logger.warning("dsde: first drafts, or their verification, will take longer: %s", error)
        return
    logger.info("dsde: kernels for all lengths compiled in %.1f s", time.perf_counter() - begin)


def determine_batch(original: Any, runner: Any, *args: Any, **kwargs: Any) -> Any:
    """Remember the shape of the batch for `dispatch`, which is told less of it."""
    graphs = getattr(runner.cudagraph_dispatcher, GRAPHS, None)
    if graphs is None:
        return original(runner, *args, **kwargs)
    named = dict(zip(hooks.DETERMINE_BATCH.parameters, args, strict=False)) | kwargs if args else kwargs
    query_len, num_reqs = int(named["max_num_scheduled_tokens"]), int(named["num_reqs"])
    is_uniform = query_len * num_reqs == named["num_tokens"] and named.get("force_uniform_decode") is not False
    graphs.batch = (query_len, num_reqs) if is_uniform else None
    try:
        return original(runner, *args, **kwargs)
    finally:
        graphs.batch = None


def dispatch(original: Any, dispatcher: Any, *args: Any, **kwargs: Any) -> Any:
    graphs = getattr(dispatcher, GRAPHS, None)
    descriptor = None if graphs is None else graphs.find()
    if graphs is None or descriptor is None or kwargs.get("has_lora"):
        return original(dispatcher, *args, **kwargs)
    valid, invalid = kwargs.get("valid_modes"), kwargs.get("invalid_modes")
    if (valid and graphs.mode not in valid) or (invalid and graphs.mode in invalid):
        return original(dispatcher, *args, **kwargs)
    return graphs.mode, descriptor


def install() -> None:
    hooks.wrap_if_known(
        {hooks.CAPTURE: capture, hooks.DETERMINE_BATCH: determine_batch, hooks.DISPATCH: dispatch},
        lost="no CUDA graphs for lengths below the largest",
    )
