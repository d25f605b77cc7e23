"""Graphs of the draft's passes: with a recorder that only does again what it was shown, on a small model with a cache.

That real CUDA graphs draft the same is tested in real vLLM on a GPU: tests_vllm/test_draft_graphs.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from dsde.integrations.vllm.draft_graphs import PADDING_SLOT, DraftGraphs, can_capture

BLOCK_SIZE, NUM_BLOCKS, MAX_BATCH, MAX_TOKENS = 4, 40, 8, 64


@dataclass
class CommonAttentionMetadata:
    """As vLLM's, as far as it is needed, with a field fewer than it has in some versions."""

    query_start_loc: torch.Tensor
    query_start_loc_cpu: torch.Tensor
    seq_lens: torch.Tensor
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table_tensor: torch.Tensor
    slot_mapping: torch.Tensor


class Model(torch.nn.Module):
    """Writes its tokens into a cache; a token's state is what its sequence has there up to it, weighed by place."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = torch.zeros(NUM_BLOCKS * BLOCK_SIZE)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, inputs_embeds: None = None) -> torch.Tensor:
        context = sys.modules["vllm.forward_context"].get_forward_context()  # type: ignore[attr-defined]
        metadata = next(iter(context.attn_metadata.values()))
        slots = next(iter(context.slot_mapping.values()))
        written = slots >= 0
        self.cache[slots[written]] = input_ids[: slots.shape[0]][written].float()
        found = torch.zeros(input_ids.shape[0], 2)
        starts = metadata.query_start_loc.tolist()
        for row, (first, last) in enumerate(pairwise(starts)):
            blocks = metadata.block_table[row]
            whole = (blocks[:, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE)).flatten()
            for token in range(first, last):
                seen = int(metadata.seq_lens[row]) - (last - 1 - token)
                past = self.cache[whole[:seen].long()]
                found[token, 0] = (past * torch.arange(1, past.shape[0] + 1)).sum()
                found[token, 1] = positions[token]
        return found


class Drafter:
    """What vLLM's has around a pass."""

    def __init__(self) -> None:
        self.model = Model()
        self.device = torch.device("cpu")
        self.dtype, self.hidden_size = torch.float32, 2
        self.max_batch_size, self.max_model_len = MAX_BATCH, 32
        self.compilation_config = SimpleNamespace(max_cudagraph_capture_size=MAX_TOKENS)
        self.vllm_config = None
        self.input_ids = torch.zeros(MAX_TOKENS, dtype=torch.int32)
        self.positions = torch.zeros(MAX_TOKENS, dtype=torch.int64)
        self._slot_mapping_buffer = torch.zeros(MAX_TOKENS, dtype=torch.int64)
        self.parallel_drafting = self.supports_mm_inputs = False
        self.draft_attn_groups = [SimpleNamespace(backend=SimpleNamespace(get_name=lambda: "FLASH_ATTN"))]

    def _get_positions(self, num: int) -> torch.Tensor:
        return self.positions[:num]

    def build_per_group_and_layer_attn_metadata(self, common: Any) -> tuple[list[Any], dict[str, Any]]:
        metadata = SimpleNamespace(
            **{name: getattr(common, name) for name in ("query_start_loc", "seq_lens", "slot_mapping")},
            num_actual_tokens=common.num_actual_tokens,
            max_query_len=common.max_query_len,
            block_table=common.block_table_tensor,
        )
        return [metadata], {"draft.0": metadata, "draft.1": metadata}


@pytest.fixture
def context(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """vLLM's forward context, and the modules that it is in."""
    now = SimpleNamespace(attn_metadata=None, slot_mapping=None, cudagraph_runtime_mode=SimpleNamespace(name="NONE"))

    @contextmanager
    def set_forward_context(metadata: Any, _: Any, num_tokens: int, slot_mapping: Any) -> Iterator[None]:
        before = (now.attn_metadata, now.slot_mapping)
        now.attn_metadata, now.slot_mapping = metadata, slot_mapping
        yield
        now.attn_metadata, now.slot_mapping = before

    modules: dict[str, dict[str, Any]] = {
        "vllm": {},
        "vllm.forward_context": {"get_forward_context": lambda: now, "set_forward_context": set_forward_context},
        "vllm.v1": {},
        "vllm.v1.attention": {},
        "vllm.v1.attention.backend": {"CommonAttentionMetadata": CommonAttentionMetadata},
    }
    for name, content in modules.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    return now


class Recorder:
    """Does again what it was shown."""

    def __init__(self) -> None:
        self.num_replayed = 0

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        run()

        def replay() -> None:
            self.num_replayed += 1
            run()

        return replay


def prepare(drafter: Drafter, context: SimpleNamespace, query_lens: list[int], seed: int) -> dict[str, Any]:
    """As vLLM prepares a pass over these many tokens of each request; returns the model's arguments."""
    generator = torch.Generator().manual_seed(seed)
    num = sum(query_lens)
    past = torch.randint(0, 9, (len(query_lens),), generator=generator)
    lens = torch.tensor(query_lens)
    order = torch.randperm(NUM_BLOCKS - 1, generator=generator)[: len(query_lens) * 4] + 1
    table = order.reshape(len(query_lens), 4).to(torch.int32)
    places = torch.cat([torch.arange(int(p), int(p + n)) for p, n in zip(past, lens, strict=True)])
    owners = torch.repeat_interleave(torch.arange(len(query_lens)), lens)
    slots = table[owners, places // BLOCK_SIZE].long() * BLOCK_SIZE + places % BLOCK_SIZE
    # One that was rejected is written nowhere. Behind the batch lie the tokens and slots of earlier ones.
    slots[torch.rand(num, generator=generator) < 0.2] = PADDING_SLOT
    drafter.input_ids[:] = torch.randint(1, 99, (MAX_TOKENS,), generator=generator)
    drafter.positions[:num] = places
    drafter._slot_mapping_buffer[:] = torch.randint(0, NUM_BLOCKS * BLOCK_SIZE, (MAX_TOKENS,), generator=generator)
    drafter._slot_mapping_buffer[:num] = slots
    drafter.model.cache[:] = torch.randint(1, 99, (NUM_BLOCKS * BLOCK_SIZE,), generator=generator).float()
    starts = torch.cat((torch.zeros(1, dtype=torch.int64), torch.cumsum(lens, 0))).to(torch.int32)
    common = CommonAttentionMetadata(
        *(starts, starts, (past + lens).to(torch.int32), len(query_lens), num, max(query_lens), 32, table),
        drafter._slot_mapping_buffer[:num],
    )
    context.attn_metadata = drafter.build_per_group_and_layer_attn_metadata(common)[1]
    context.slot_mapping = dict.fromkeys(context.attn_metadata, drafter._slot_mapping_buffer[:num])
    context.cudagraph_runtime_mode = SimpleNamespace(name="PIECEWISE")
    return {"input_ids": drafter.input_ids[:num], "positions": drafter.positions[:num], "inputs_embeds": None}


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def drafter(context: SimpleNamespace, recorder: Recorder) -> Drafter:
    made = Drafter()
    graphs = DraftGraphs(made, torch.zeros((1, 4), dtype=torch.int32), recorder)
    for query_len in (1, 2, 3):
        graphs.capture(query_len, (1, 2, 4, 8))
    graphs.install()
    assert graphs.num_captured == 12
    return made


@pytest.mark.parametrize("query_lens", [[1], [1] * 3, [2] * 4, [3] * 5, [3] * 8, [2]])
@pytest.mark.parametrize("seed", range(3))
def test_like_the_model_itself(
    drafter: Drafter, context: SimpleNamespace, recorder: Recorder, query_lens: list[int], seed: int
) -> None:
    """Also where a graph has more rows than there are requests: nothing of theirs is touched."""
    num = sum(query_lens)
    expected = Model.forward(drafter.model, **prepare(drafter, context, query_lens, seed))
    cache = drafter.model.cache.clone()
    found = drafter.model(**prepare(drafter, context, query_lens, seed))
    assert recorder.num_replayed == 1
    assert found.shape[0] >= num
    assert torch.equal(found[:num], expected[:num])
    assert torch.equal(drafter.model.cache, cache)


@pytest.mark.parametrize("query_lens", [[1, 2], [4, 4], [1] * 9])
def test_what_fits_no_graph_goes_as_before(
    drafter: Drafter, context: SimpleNamespace, recorder: Recorder, query_lens: list[int]
) -> None:
    expected = Model.forward(drafter.model, **prepare(drafter, context, query_lens, 0))
    found = drafter.model(**prepare(drafter, context, query_lens, 0))
    assert recorder.num_replayed == 0
    assert torch.equal(found, expected)


def test_who_reads_elsewhere_goes_as_before(drafter: Drafter, context: SimpleNamespace, recorder: Recorder) -> None:
    inputs = prepare(drafter, context, [2, 2], 0)
    drafter.model(**inputs | {"positions": inputs["positions"].clone()})
    with pytest.raises(TypeError, match="hidden_states"):
        drafter.model(**inputs, hidden_states=None)
    context.cudagraph_runtime_mode = SimpleNamespace(name="NONE")
    drafter.model(**inputs)
    assert recorder.num_replayed == 0
    context.cudagraph_runtime_mode = SimpleNamespace(name="PIECEWISE")
    drafter.model(**inputs)
    assert recorder.num_replayed == 1


@pytest.mark.parametrize(
    ("changes", "can"),
    [
        ({}, True),
        ({"method": "eagle"}, False),
        ({"enforce_eager": True}, False),
        ({"parallel_drafting": True}, False),
        ({"supports_mm_inputs": True}, False),
        ({"draft_attn_groups": [SimpleNamespace(backend=SimpleNamespace(get_name=lambda: "FLASHINFER"))]}, False),
        ({"draft_attn_groups": []}, False),
        ({"model": lambda: None}, False),
    ],
)
def test_which_drafts_can_be_captured(changes: dict[str, Any], can: bool) -> None:
    drafter, speculative = Drafter(), SimpleNamespace(method="draft_model", enforce_eager=False)
    for name, value in changes.items():
        setattr(speculative if hasattr(speculative, name) else drafter, name, value)
    assert can_capture(SimpleNamespace(drafter=drafter, speculative_config=speculative)) is can
