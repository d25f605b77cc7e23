"""The GGUF reader against llama.cpp's own Python package, and on files that are broken."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter

from dsde.core.errors import ModelError
from dsde.models.gguf import GGUFFile
from dsde.models.gguf_model import gguf_config, gguf_tensors
from dsde.models.gguf_quant import CHUNK_ELEMENTS, FORMATS, unpack

# Where the half-precision scales lie in a block: random bytes there could be NaN.
SCALES = {
    "F32": [],
    "F16": [],
    "BF16": [],
    "Q4_0": [0],
    "Q4_1": [0, 2],
    "Q5_0": [0],
    "Q5_1": [0, 2],
    "Q8_0": [0],
    "Q4_K": [0, 2],
    "Q5_K": [0, 2],
    "Q6_K": [208],
}
HEADS, KV_HEADS, HEAD_DIM, HIDDEN, FFN, VOCAB = 4, 2, 8, 32, 64, 48


def random_blocks(type_id: int, num_blocks: int) -> np.ndarray:
    kind = FORMATS[type_id]
    rng = np.random.default_rng(type_id)
    if kind.elements == 1:
        values = rng.standard_normal(num_blocks).astype(np.float32)
        if kind.name == "BF16":
            return torch.from_numpy(values).bfloat16().view(torch.uint8).numpy()
        return values.astype(np.float16 if kind.name == "F16" else np.float32).view(np.uint8)
    blocks = rng.integers(0, 256, (num_blocks, kind.bytes), dtype=np.uint8)
    for at in SCALES[kind.name]:
        scales = rng.standard_normal((num_blocks, 1)).astype(np.float16)
        blocks[:, at : at + 2] = scales.view(np.uint8)
    return blocks.reshape(-1)


@pytest.mark.parametrize("type_id", FORMATS, ids=[kind.name for kind in FORMATS.values()])
def test_every_type_unpacks_to_what_llama_cpp_says(type_id: int) -> None:
    kind = FORMATS[type_id]
    num_blocks = 2 * CHUNK_ELEMENTS // kind.elements + 3
    raw = random_blocks(type_id, num_blocks)
    out = np.empty(num_blocks * kind.elements, np.float32)
    unpack(kind, raw, out)
    expected = gguf.quants.dequantize(raw.reshape(num_blocks, -1), GGMLQuantizationType(type_id))
    np.testing.assert_array_equal(out, expected.reshape(-1))
    assert np.isfinite(out).all()
    assert out.std() > 0.1


def hf_tensors(names: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in names.items()}


def write_gguf(
    path: Path,
    arch: str,
    tensors: dict[str, torch.Tensor],
    meta: dict[str, Any] | None = None,
) -> Path:
    writer = GGUFWriter(path, arch)
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(500000.0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for key, value in (meta or {}).items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        else:
            writer.add_float32(key, value)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def small_model() -> dict[str, torch.Tensor]:
    """The GGUF names of a one-layer model; attn_q and attn_k numbered so that a permutation shows."""
    tensors = hf_tensors(
        {
            "token_embd.weight": (VOCAB, HIDDEN),
            "output_norm.weight": (HIDDEN,),
            "blk.0.attn_norm.weight": (HIDDEN,),
            "blk.0.ffn_norm.weight": (HIDDEN,),
            "blk.0.attn_v.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            "blk.0.attn_output.weight": (HIDDEN, HEADS * HEAD_DIM),
            "blk.0.ffn_gate.weight": (FFN, HIDDEN),
            "blk.0.ffn_up.weight": (FFN, HIDDEN),
            "blk.0.ffn_down.weight": (HIDDEN, FFN),
        }
    )
    for name, heads in (("attn_q", HEADS), ("attn_k", KV_HEADS)):
        rows = torch.arange(heads * HEAD_DIM, dtype=torch.float32)
        tensors[f"blk.0.{name}.weight"] = rows[:, None].repeat(1, HIDDEN)
    return tensors


def test_llama_files_have_their_rope_permutation_undone(tmp_path: Path) -> None:
    file = GGUFFile(write_gguf(tmp_path / "m.gguf", "llama", small_model()))
    tensors = gguf_tensors(file)
    # In the file rows 2i and 2i+1 of a head rotate together; in Hugging Face's order rows i and i + half do.
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    expected = [head * HEAD_DIM + row for head in range(HEADS) for row in order]
    assert tensors["model.layers.0.self_attn.q_proj.weight"][:, 0].tolist() == expected
    assert tensors["model.layers.0.self_attn.k_proj.weight"][:, 0].tolist() == expected[: KV_HEADS * HEAD_DIM]


def test_qwen_files_have_no_permutation_to_undo(tmp_path: Path) -> None:
    file = GGUFFile(write_gguf(tmp_path / "m.gguf", "qwen2", small_model()))
    query = gguf_tensors(file)["model.layers.0.self_attn.q_proj.weight"]
    assert query[:, 0].tolist() == list(range(HEADS * HEAD_DIM))


def test_gemma_norms_lose_the_one_that_the_file_adds(tmp_path: Path) -> None:
    stored = small_model() | {
        "blk.0.post_attention_norm.weight": torch.full((HIDDEN,), 1.5),
        "blk.0.post_ffw_norm.weight": torch.full((HIDDEN,), 1.25),
        "blk.0.attn_q_norm.weight": torch.full((HEAD_DIM,), 3.0),
        "blk.0.attn_k_norm.weight": torch.full((HEAD_DIM,), 4.0),
    }
    path = write_gguf(tmp_path / "m.gguf", "gemma3", stored, {"gemma3.attention.sliding_window": 16})
    file = GGUFFile(path)
    tensors = gguf_tensors(file)
    assert tensors["model.layers.0.post_attention_layernorm.weight"].eq(0.5).all()
    assert tensors["model.layers.0.post_feedforward_layernorm.weight"].eq(0.25).all()
    assert tensors["model.layers.0.self_attn.q_norm.weight"].eq(2.0).all()
    torch.testing.assert_close(tensors["model.norm.weight"], stored["output_norm.weight"] - 1)
    before_mlp = tensors["model.layers.0.pre_feedforward_layernorm.weight"]
    torch.testing.assert_close(before_mlp, stored["blk.0.ffn_norm.weight"] - 1)
    torch.testing.assert_close(tensors["model.embed_tokens.weight"], stored["token_embd.weight"])
    config = gguf_config(file)
    assert (config["model_type"], config["sliding_window"]) == ("gemma3_text", 16)
    assert config["layer_types"] == ["sliding_attention"]


def test_config_has_the_hugging_face_fields(tmp_path: Path) -> None:
    file = GGUFFile(write_gguf(tmp_path / "m.gguf", "llama", small_model()))
    config = gguf_config(file)
    expected = {
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 128,
        "rope_theta": 500000.0,
        "vocab_size": VOCAB,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    assert {key: config[key] for key in expected} == expected
    assert "rope_scaling" not in config


def test_an_output_matrix_of_its_own_unties_the_head(tmp_path: Path) -> None:
    tensors = small_model() | {"output.weight": torch.ones(VOCAB, HIDDEN)}
    file = GGUFFile(write_gguf(tmp_path / "m.gguf", "llama", tensors))
    assert gguf_config(file)["tie_word_embeddings"] is False
    assert gguf_tensors(file)["lm_head.weight"].eq(1).all()


def llama3_factors(factor: float, head_dim: int, theta: float) -> torch.Tensor:
    """The factors that llama.cpp writes, computed frequency by frequency."""
    factors = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * np.pi * theta ** (i / head_dim)
        if wavelength < 8192 / 4.0:
            factors.append(1.0)
        elif wavelength > 8192 / 1.0:
            factors.append(factor)
        else:
            smooth = (8192 / wavelength - 1.0) / (4.0 - 1.0)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return torch.tensor(factors, dtype=torch.float32)


def test_rope_factors_become_llama3_scaling(tmp_path: Path) -> None:
    factors = llama3_factors(32.0, HEAD_DIM, 500000.0)
    file = GGUFFile(write_gguf(tmp_path / "m.gguf", "llama", small_model() | {"rope_freqs.weight": factors}))
    assert gguf_config(file)["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    assert not any("rope" in name for name in gguf_tensors(file))


def test_other_rope_factors_are_refused_not_ignored(tmp_path: Path) -> None:
    factors = torch.tensor([1.0, 2.0, 3.0, 5.0])
    file = GGUFFile(write_gguf(tmp_path / "m.gguf", "llama", small_model() | {"rope_freqs.weight": factors}))
    with pytest.raises(ModelError, match="factors of its own"):
        gguf_config(file)


def test_scaling_keys_are_passed_on(tmp_path: Path) -> None:
    meta = {"qwen2.rope.scaling.type": "yarn", "qwen2.rope.scaling.factor": 4.0}
    meta["qwen2.rope.scaling.original_context_length"] = 64
    file = GGUFFile(write_gguf(tmp_path / "m.gguf", "qwen2", small_model(), meta))
    expected = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    assert gguf_config(file)["rope_scaling"] == expected


def test_a_truncated_file_is_refused_wherever_it_is_cut(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "whole.gguf", "llama", small_model()).read_bytes()
    cut = tmp_path / "cut.gguf"
    for length in [0, 3, 4, 10, 30, 100, 400, len(whole) // 2, len(whole) - 200]:
        cut.write_bytes(whole[:length])
        with pytest.raises(ModelError, match=r"cut\.gguf") as caught:
            GGUFFile(cut)
        assert str(caught.value).endswith(".")


def test_random_damage_in_the_header_never_escapes_as_another_error(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "whole.gguf", "llama", small_model()).read_bytes()
    rng = np.random.default_rng(0)
    damaged = tmp_path / "damaged.gguf"
    num_refused = 0
    for _ in range(200):
        data = bytearray(whole)
        for at in rng.integers(4, 1500, 4):
            data[at] = rng.integers(256)
        damaged.write_bytes(data)
        try:
            file = GGUFFile(damaged)
            gguf_config(file)
            gguf_tensors(file)
        except ModelError:
            num_refused += 1
    assert num_refused > 50


def test_an_unknown_tensor_type_is_named(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    writer = GGUFWriter(path, "llama")
    raw = np.zeros((1, 66), np.uint8)
    writer.add_tensor("token_embd.weight", raw, raw_dtype=GGMLQuantizationType.IQ2_XXS)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match=r"token_embd\.weight in GGUF tensor type 16; the types read are F32"):
        GGUFFile(path)


def test_an_unknown_architecture_is_named(tmp_path: Path) -> None:
    file = GGUFFile(write_gguf(tmp_path / "m.gguf", "mamba", small_model()))
    with pytest.raises(ModelError, match="'mamba'; the GGUF architectures supported are llama, qwen2"):
        gguf_config(file)


def test_something_else_is_not_taken_for_gguf(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"PK\x03\x04 not a model")
    with pytest.raises(ModelError, match="is not a GGUF file"):
        GGUFFile(path)
    with pytest.raises(ModelError, match="cannot be read"):
        GGUFFile(tmp_path / "missing.gguf")
