"""How many KV blocks there is memory for, and what is said where there is none."""

from __future__ import annotations

import re

import pytest
import torch

from dsde import InvalidInput
from dsde.core.errors import ModelError
from dsde.engine.config import EngineConfig
from dsde.engine.memory import count_blocks
from dsde.models.batch import BLOCK_SIZE
from dsde.models.decoder import Decoder
from tiny import make_engine, tiny_model

HAS_CUDA = torch.cuda.is_available()
needs_gpu = [pytest.mark.gpu, pytest.mark.skipif(not HAS_CUDA, reason="needs a CUDA device")]
DEVICES = ["cpu", pytest.param("cuda", marks=needs_gpu)]
GIB = 1 << 30


def block_bytes(model: Decoder) -> int:
    return model.config.kv_bytes_per_token(model.dtype) * BLOCK_SIZE


@pytest.mark.parametrize("device", DEVICES)
def test_a_budget_is_shared_by_target_and_draft(device: str) -> None:
    target = tiny_model(device=device)
    config = EngineConfig(kv_cache_bytes=100 * block_bytes(target))
    assert count_blocks(target, 0, config) == 100
    assert count_blocks(target, block_bytes(target), config) == 50
    assert count_blocks(target, 3 * block_bytes(target), config) == 25


@pytest.mark.parametrize("device", DEVICES)
def test_no_more_than_all_sequences_could_fill(device: str) -> None:
    target = tiny_model(device=device, max_len=512)
    assert count_blocks(target, 0, EngineConfig(max_num_seqs=3)) == 3 * 512 // BLOCK_SIZE
    assert count_blocks(target, 0, EngineConfig(max_num_seqs=3, max_model_len=100)) == 3 * 7


@pytest.mark.parametrize("device", DEVICES)
def test_less_than_one_block_is_refused(device: str) -> None:
    target = tiny_model(device=device)
    assert count_blocks(target, 0, EngineConfig(kv_cache_bytes=block_bytes(target))) == 1
    with pytest.raises(InvalidInput, match=r"at least|would fit"):
        count_blocks(target, 0, EngineConfig(kv_cache_bytes=block_bytes(target) - 1))


def test_a_cpu_is_taken_at_its_word() -> None:
    """What is asked for is not compared to what is free: pages that nobody touches cost nothing."""
    target = tiny_model(max_len=1 << 12)
    config = EngineConfig(kv_cache_bytes=1 << 50, max_num_seqs=1)
    assert count_blocks(target, 0, config) == (1 << 12) // BLOCK_SIZE


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_CUDA, reason="needs a CUDA device")
class TestOnCuda:
    def test_more_than_the_card_has_is_refused_with_what_fits(self) -> None:
        target = tiny_model(device="cuda", max_len=1 << 20)
        _, total = torch.cuda.mem_get_info()
        with pytest.raises(InvalidInput) as refusal:
            make_engine(target, None, kv_cache_bytes=2 * total, max_num_seqs=1 << 16)
        message = str(refusal.value)
        assert f"{2 * total / GIB:.2f} GiB" in message
        assert f"{total / GIB:.1f} GiB" in message
        found = re.search(r"(\d+) tokens \(kv_cache_bytes=(\d+)\) would fit", message)
        assert found is not None
        tokens, fits = map(int, found.groups())
        assert 0 < fits < total
        assert tokens == fits // block_bytes(target) * BLOCK_SIZE
        # What it names can be had.
        assert count_blocks(target, 0, EngineConfig(kv_cache_bytes=fits - GIB)) > 0

    def test_without_a_wish_most_of_what_is_free_is_used(self) -> None:
        target = tiny_model(device="cuda", max_len=1 << 20)
        num_blocks = count_blocks(target, 0, EngineConfig(max_num_seqs=1 << 16))
        free, _ = torch.cuda.mem_get_info()
        assert 0.7 * free < num_blocks * block_bytes(target) < free

    def test_a_model_that_is_too_large_is_refused_before_it_is_copied(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (1 << 10, 80 * GIB))
        before = torch.cuda.memory_allocated()
        with pytest.raises(ModelError, match=r"the weights need .* GiB in float32, but of the GPU's 80.0 GiB"):
            tiny_model(device="cuda")
        assert torch.cuda.memory_allocated() == before
