"""CUDA graphs of the draft's whole passes, for batches in which every request reads equally many tokens.

vLLM runs a draft model in pieces, and launches the attention of every layer by itself: a small model has done its work
before the next piece is launched, and waits. A graph of the whole pass is launched at once. It reads what vLLM prepares
for a pass where it was when the graph was captured: tokens, positions and slots lie in buffers of vLLM's that stay;
lengths and block tables are copied into buffers kept here. Knows nothing of lengths of drafts, nor of policies.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_left
from collections.abc import Callable, Iterable
from typing import Any

import torch

PADDING_SLOT = -1
"""where vLLM writes what nobody is to read"""

INPUTS = {"input_ids", "positions", "inputs_embeds"}

Recorder = Callable[[Callable[[], None]], Callable[[], None]]
"""makes of something that is done on the device something that does it again"""


@dataclasses.dataclass(slots=True)
class _Graph:
    num_reqs: int
    replay: Callable[[], None]
    metadata: Any
    """of the attention in it, which must stay where it is"""


class DraftGraphs:
    def __init__(self, drafter: Any, block_table: torch.Tensor, record: Recorder) -> None:
        """`block_table` is any of a batch, for its width."""
        self.drafter = drafter
        self._record = record
        self._forward = drafter.model.forward
        self._graphs: dict[int, tuple[list[int], list[_Graph]]] = {}
        """by tokens of each request: numbers of requests, ascending, and the graphs"""
        num = drafter.max_batch_size
        self._seq_lens = torch.ones(num, dtype=torch.int32, device=drafter.device)
        self._block_table = block_table.new_zeros((num, block_table.shape[1]))
        self._hidden_states: torch.Tensor | None = None

    @property
    def num_captured(self) -> int:
        return sum(len(graphs) for _, graphs in self._graphs.values())

    def capture(self, query_len: int, sizes: Iterable[int]) -> None:
        """Graphs of passes over `query_len` tokens of each of so many requests."""
        # The largest first: the others fit into its memory.
        graphs = [self._capture(query_len, num_reqs) for num_reqs in sorted(sizes, reverse=True)][::-1]
        self._graphs[query_len] = ([graph.num_reqs for graph in graphs], graphs)

    def _capture(self, query_len: int, num_reqs: int) -> _Graph:
        from vllm.forward_context import set_forward_context

        drafter, num_tokens = self.drafter, num_reqs * query_len
        # Nobody is to find what is computed meanwhile in the cache, nor is anything to be read beyond it.
        slots = drafter._slot_mapping_buffer[:num_tokens].fill_(PADDING_SLOT)
        self._seq_lens[:num_reqs] = query_len
        self._block_table[:num_reqs] = 0
        common = uniform_metadata(
            drafter, query_len, self._block_table[:num_reqs], self._seq_lens[:num_reqs], slot_mapping=slots
        )
        _, metadata = drafter.build_per_group_and_layer_attn_metadata(common)
        inputs = {
            "input_ids": drafter.input_ids[:num_tokens],
            "positions": drafter._get_positions(num_tokens),
            "inputs_embeds": None,
        }
        if self._hidden_states is None:
            self._hidden_states = torch.empty(
                (drafter.compilation_config.max_cudagraph_capture_size, drafter.hidden_size),
                dtype=drafter.dtype,
                device=drafter.device,
            )
        found = self._hidden_states[:num_tokens]

        def run() -> None:
            with set_forward_context(
                metadata,
                drafter.vllm_config,
                num_tokens=num_tokens,
                slot_mapping=dict.fromkeys(metadata, slots),
            ):
                found.copy_(self._forward(**inputs))

        return _Graph(num_reqs, self._record(run), metadata)

    def install(self) -> None:
        self.drafter.model.forward = self.forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """In the place of the model's."""
        from vllm.forward_context import get_forward_context

        context = get_forward_context()
        graph = None
        by_layer = context.attn_metadata
        # Without metadata it is a dummy run; a pass that vLLM would not run as graphs is none of ours, either.
        is_whole = isinstance(by_layer, dict) and by_layer and context.cudagraph_runtime_mode.name == "PIECEWISE"
        if is_whole and self._is_ours(args, kwargs):
            metadata = next(iter(by_layer.values()))
            graph = self._find(metadata)
        if graph is None:
            return self._forward(*args, **kwargs)
        return self._replay(graph, metadata)

    def _is_ours(self, args: Any, kwargs: Any) -> bool:
        """Whether the pass reads where graphs do."""
        if args or kwargs.get("inputs_embeds") is not None or not kwargs.keys() <= INPUTS:
            return False
        drafter = self.drafter
        here = (kwargs["input_ids"].data_ptr(), kwargs["positions"].data_ptr())
        return here == (drafter.input_ids.data_ptr(), drafter.positions.data_ptr())

    def _find(self, metadata: Any) -> _Graph | None:
        """The smallest graph that the batch fits into."""
        query_len, num_reqs = metadata.max_query_len, metadata.seq_lens.shape[0]
        if query_len * num_reqs != metadata.num_actual_tokens:
            return None
        sizes, graphs = self._graphs.get(query_len, ((), []))
        place = bisect_left(sizes, num_reqs)
        return graphs[place] if place < len(graphs) else None

    def _replay(self, graph: _Graph, metadata: Any) -> torch.Tensor:
        num, query_len = metadata.seq_lens.shape[0], metadata.max_query_len
        self._seq_lens[:num].copy_(metadata.seq_lens)
        self._block_table[:num].copy_(metadata.block_table[:num])
        if graph.num_reqs > num:
            # Rows that nobody asked for read block 0, which belongs to nobody, and are written nowhere.
            self._seq_lens[num : graph.num_reqs].fill_(query_len)
            self._block_table[num : graph.num_reqs].zero_()
            self.drafter._slot_mapping_buffer[num * query_len : graph.num_reqs * query_len].fill_(PADDING_SLOT)
        graph.replay()
        assert self._hidden_states is not None
        return self._hidden_states[: graph.num_reqs * query_len]


def uniform_metadata(
    drafter: Any,
    query_len: int,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor | None = None,
    slot_mapping: torch.Tensor | None = None,
) -> Any:
    """vLLM's of a batch whose every request has `query_len` tokens, and whose contexts may be as long as any."""
    from vllm.v1.attention.backend import CommonAttentionMetadata

    num_reqs, device = len(block_table), drafter.device
    starts = torch.arange(num_reqs + 1, dtype=torch.int32) * query_len
    lens = torch.full((num_reqs,), query_len, dtype=torch.int32)
    if slot_mapping is None:
        slot_mapping = torch.full((num_reqs * query_len,), PADDING_SLOT, dtype=torch.int64, device=device)
    values = {
        "query_start_loc": starts.to(device),
        "query_start_loc_cpu": starts,
        "seq_lens": lens.to(device) if seq_lens is None else seq_lens,
        "num_reqs": num_reqs,
        "num_actual_tokens": num_reqs * query_len,
        "max_query_len": query_len,
        "max_seq_len": drafter.max_model_len,
        "block_table_tensor": block_table,
        "slot_mapping": slot_mapping,
        "seq_lens_cpu_upper_bound": lens,
        "_seq_lens_cpu": lens.clone(),
        "_num_computed_tokens_cpu": torch.zeros_like(lens),
        "is_prefilling": torch.zeros(num_reqs, dtype=torch.bool),
    }
    known = {one.name for one in dataclasses.fields(CommonAttentionMetadata)}
    return CommonAttentionMetadata(**{name: value for name, value in values.items() if name in known})


def can_capture(runner: Any) -> bool:
    """Whether the draft is a model of its own, with attention that can be part of a graph as vLLM prepares it."""
    drafter, speculative = getattr(runner, "drafter", None), runner.speculative_config
    if drafter is None or speculative.method != "draft_model" or speculative.enforce_eager or drafter.parallel_drafting:
        return False
    if drafter.supports_mm_inputs or not hasattr(drafter, "positions"):
        return False
    groups = drafter.draft_attn_groups
    # Others plan a pass on the host.
    has_attention = len(groups) == 1 and groups[0].backend.get_name() == "FLASH_ATTN"
    # One that is compiled as a whole never asks for `forward` again.
    return has_attention and type(drafter.model).__call__ is torch.nn.Module.__call__


def record_cuda_graph(run: Callable[[], None]) -> Callable[[], None]:
    """In memory that vLLM's own graphs share."""
    from vllm.platforms import current_platform

    run()  # compiles, and finds its workspaces
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=current_platform.get_global_graph_pool(), stream=torch.cuda.current_stream()):
        run()
    return graph.replay
