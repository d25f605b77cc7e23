"""Every family against transformers, through prefill, chunked prefill and ragged decoding over scattered blocks."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import save_file

from dsde.core.errors import ModelError
from dsde.device import backend
from dsde.models.batch import BLOCK_SIZE, KVCache, pack
from dsde.models.config import ModelConfig
from dsde.models.decoder import Decoder
from dsde.models.derived import add_noise, round_to_bits, skip_layers
from dsde.models.linear import Linear
from dsde.models.weights import build_model, load_safetensors
from tiny import tiny_model

TINY: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "attn_implementation": "eager",
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
WINDOWED = {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}
GEMMA = {"head_dim": 16, "sliding_window": 24, "query_pre_attn_scalar": 24, "tie_word_embeddings": True}
GEMMA3_LAYERS = {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"]}

FAMILIES: dict[str, transformers.PretrainedConfig] = {
    "llama 2": transformers.LlamaConfig(**TINY | {"num_key_value_heads": 6}),
    "llama 3": transformers.LlamaConfig(**TINY, rope_parameters=LLAMA3_ROPE),
    "llama yarn": transformers.LlamaConfig(**TINY, rope_parameters=YARN_ROPE),
    "llama linear": transformers.LlamaConfig(
        **TINY, rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
    ),
    "llama biased": transformers.LlamaConfig(**TINY, attention_bias=True, mlp_bias=True),
    "smollm 2": transformers.LlamaConfig(**TINY | {"tie_word_embeddings": True}),
    "mistral": transformers.MistralConfig(**TINY, sliding_window=24, head_dim=8),
    "qwen 2": transformers.Qwen2Config(**TINY),
    "qwen 2 windowed": transformers.Qwen2Config(**TINY, **WINDOWED),
    "qwen 3": transformers.Qwen3Config(**TINY, head_dim=16),
    "gemma 2": transformers.Gemma2Config(**TINY | GEMMA, attn_logit_softcapping=5.0, final_logit_softcapping=3.0),
    "gemma 3": transformers.Gemma3TextConfig(**TINY | GEMMA | GEMMA3_LAYERS),
}


def reference_model(config: transformers.PretrainedConfig, seed: int = 0) -> transformers.PreTrainedModel:
    """Random weights, large enough that logits and attention are far from uniform."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for name, parameter in model.named_parameters():
        is_norm = parameter.dim() == 1 and name.endswith("weight")
        torch.nn.init.normal_(parameter, mean=float(is_norm), std=0.2)
    return model


def named_tensors(model: transformers.PreTrainedModel) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def own_model(reference: transformers.PreTrainedModel, device: str = "cpu") -> Decoder:
    config = ModelConfig.from_hf(reference.config.to_dict())
    return build_model(config, named_tensors(reference), torch.float32, device)


class Sequences:
    """Token sequences that advance through a model by chosen numbers of tokens, on scattered blocks."""

    def __init__(self, model: Decoder, tokens: list[torch.Tensor], seed: int = 0) -> None:
        self.model = model
        self.tokens = tokens
        self.done = [0] * len(tokens)
        counts = [-(-len(sequence) // BLOCK_SIZE) for sequence in tokens]
        free = np.random.default_rng(seed).permutation(sum(counts) + 3).tolist()
        self.tables = [[free.pop() for _ in range(count)] for count in counts]
        self.cache: KVCache = model.new_cache(sum(counts) + 3)

    def advance(self, steps: dict[int, int], rows: list[int] | None = None) -> torch.Tensor:
        """Run the next `steps[i]` tokens of each sequence i, packed in the order given."""
        taken = [self.tokens[i][self.done[i] : self.done[i] + step] for i, step in steps.items()]
        for i, step in steps.items():
            self.done[i] += step
        batch = pack(
            torch.cat(taken).numpy(),
            np.array(list(steps.values())),
            np.array([self.done[i] for i in steps]),
            [self.tables[i] for i in steps],
            None if rows is None else np.array(rows, dtype=np.int64),
            self.model.device,
        )
        return self.model.forward(batch, self.cache)


def random_tokens(*lengths: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(0, TINY["vocab_size"], (length,), generator=generator) for length in lengths]


@torch.no_grad()
def reference_logits(model: transformers.PreTrainedModel, tokens: list[torch.Tensor]) -> list[torch.Tensor]:
    return [model(sequence[None]).logits[0].float() for sequence in tokens]


@pytest.fixture(scope="module", params=FAMILIES.values(), ids=FAMILIES.keys())
def reference(request: pytest.FixtureRequest) -> transformers.PreTrainedModel:
    return reference_model(request.param)


def assert_same(got: torch.Tensor, expected: list[torch.Tensor]) -> None:
    joined = torch.cat(expected)
    assert joined.std() > 0.3
    torch.testing.assert_close(got, joined, atol=1e-4, rtol=0)


def test_prefill_in_one_go(reference: transformers.PreTrainedModel) -> None:
    tokens = random_tokens(70, 9, 33)
    sequences = Sequences(own_model(reference), tokens)
    assert_same(sequences.advance({0: 70, 1: 9, 2: 33}), reference_logits(reference, tokens))


def test_chunked_prefill_then_ragged_verification(reference: transformers.PreTrainedModel) -> None:
    tokens = random_tokens(90, 60, 25, 48)
    expected = reference_logits(reference, tokens)
    sequences = Sequences(own_model(reference), tokens)
    for steps in (
        {0: 40, 1: 3},
        {1: 30, 0: 18, 2: 1},
        {2: 5, 3: 40, 0: 20},
        {3: 1, 0: 1, 1: 1, 2: 1},
        {0: 5, 1: 2, 2: 4, 3: 3},
        {2: 6, 0: 1},
    ):
        starts = dict(enumerate(sequences.done))
        got = sequences.advance(steps)
        assert_same(got, [expected[i][starts[i] : starts[i] + step] for i, step in steps.items()])


@pytest.mark.parametrize("num_layers", [1, 2, 3, 5, 9, 12, 17])
def test_a_pass_in_parts_is_the_whole_pass(num_layers: int) -> None:
    """No layer twice and none left out; at least two parts, so that whoever begins with the first has a rest."""
    model = tiny_model(layers=num_layers)
    done: list[int] = []

    def layer(number: int) -> Callable[..., torch.Tensor]:
        run = model.layers[number]

        def noted(*args: Any) -> torch.Tensor:
            done.append(number)
            return run(*args)

        noted.is_local = run.is_local  # type: ignore[attr-defined]
        return noted

    parted = replace(model, layers=[layer(number) for number in range(num_layers)])  # type: ignore[misc]
    tokens = [torch.arange(7)]
    expected = Sequences(model, tokens).advance({0: 7})
    sequences, num_parts = Sequences(parted, tokens), 1

    def read(self: Decoder, *args: Any) -> torch.Tensor:
        nonlocal num_parts
        body = Decoder.read_in_parts(self, *args)
        while True:
            try:
                next(body)
                num_parts += 1
            except StopIteration as end:
                return end.value

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Decoder, "read", read)
        torch.testing.assert_close(sequences.advance({0: 7}), expected, atol=0, rtol=0)
    assert done == list(range(num_layers))
    assert num_parts == (2 if num_layers < 5 else 3)


def test_attention_and_rotation_by_kernel(
    reference: transformers.PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The Triton kernels of every family's attention, interpreted: reading, verifying and decoding in one batch."""
    pytest.importorskip("triton")
    monkeypatch.setattr(backend, "has_kernels", lambda device: True)
    tokens = random_tokens(11, 23)
    sequences = Sequences(own_model(reference), tokens)
    got = [sequences.advance({0: 7, 1: 3}), sequences.advance({1: 19, 0: 3}), sequences.advance({0: 1, 1: 1})]
    first, second = reference_logits(reference, tokens)
    expected = [first[:7], second[:3], second[3:22], first[7:10], first[10:], second[22:]]
    assert_same(torch.cat(got), expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda(reference: transformers.PreTrainedModel) -> None:
    tokens = random_tokens(70, 9)
    sequences = Sequences(own_model(reference, "cuda"), tokens)
    expected = reference_logits(reference, tokens)
    sequences.advance({0: 60, 1: 2})
    got = sequences.advance({0: 4, 1: 7}).cpu()
    torch.testing.assert_close(got, torch.cat([expected[0][60:64], expected[1][2:]]), atol=1e-2, rtol=1e-2)


def test_rejected_tokens_are_overwritten(reference: transformers.PreTrainedModel) -> None:
    right, wrong = random_tokens(50, 50)
    sequences = Sequences(own_model(reference), [right])
    sequences.advance({0: 40})
    sequences.tokens = [wrong]
    sequences.advance({0: 6})
    sequences.tokens, sequences.done = [right], [40]
    assert_same(sequences.advance({0: 4}), [reference_logits(reference, [right])[0][40:44]])


@pytest.fixture(scope="module")
def llama() -> transformers.PreTrainedModel:
    return reference_model(FAMILIES["llama 3"])


def test_only_the_asked_rows_get_logits(llama: transformers.PreTrainedModel) -> None:
    model = own_model(llama)
    tokens = random_tokens(20, 7)
    everything = Sequences(model, tokens).advance({0: 20, 1: 7})
    some = Sequences(model, tokens).advance({0: 20, 1: 7}, rows=[26, 3, 19])
    torch.testing.assert_close(some, everything[[26, 3, 19]])
    none = Sequences(model, tokens).advance({0: 20, 1: 7}, rows=[])
    assert none.shape == (0, TINY["vocab_size"])
    assert none.dtype is torch.float32


def test_bfloat16_logits_are_float32_and_close(reference: transformers.PreTrainedModel) -> None:
    config = ModelConfig.from_hf(reference.config.to_dict())
    model = build_model(config, named_tensors(reference), torch.bfloat16)
    tokens = random_tokens(40)
    got = Sequences(model, tokens).advance({0: 40})
    expected = reference_logits(reference, tokens)[0]
    assert got.dtype is torch.float32
    assert torch.nn.functional.cosine_similarity(got, expected).mean() > 0.98


@pytest.mark.parametrize("num_rows", [1, 2, 3, 5, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear_equals_torch(num_rows: int, dtype: torch.dtype) -> None:
    weight, bias, x = torch.randn(24, 36).to(dtype), torch.randn(24).to(dtype), torch.randn(num_rows, 36).to(dtype)
    for offset in (None, bias):
        got = Linear(weight, offset)(x)
        torch.testing.assert_close(got, torch.nn.functional.linear(x, weight, offset))


def test_skipped_layers_equal_a_model_without_them(llama: transformers.PreTrainedModel) -> None:
    draft = skip_layers(own_model(llama), 1, 1)
    shorter = named_tensors(llama)
    for name in [name for name in shorter if ".layers.1." in name]:
        del shorter[name]
    renamed = {name.replace(".layers.2.", ".layers.1."): tensor for name, tensor in shorter.items()}
    tokens = random_tokens(30)
    expected = Sequences(build_model(draft.config, renamed, torch.float32), tokens).advance({0: 30})
    assert torch.equal(Sequences(draft, tokens).advance({0: 30}), expected)
    with pytest.raises(ModelError, match="layers 0 to 2"):
        skip_layers(own_model(llama), 2, 3)


def test_noise_and_rounding_change_projections_only(llama: transformers.PreTrainedModel) -> None:
    tensors = named_tensors(llama)
    noisy, same = add_noise(tensors, 0.1, seed=1), add_noise(tensors, 0.1, seed=1)
    rounded = round_to_bits(tensors, 4)
    for name, tensor in tensors.items():
        if tensor.dim() == 1 or "embed_tokens" in name:
            assert noisy[name] is tensor
            assert rounded[name] is tensor
            continue
        assert torch.equal(noisy[name], same[name])
        assert ((noisy[name] - tensor).std() / tensor.std()).item() == pytest.approx(0.1, rel=0.1)
        assert all(len(row[:32].unique()) <= 16 for row in rounded[name])
        span = tensor.max() - tensor.min()
        assert (rounded[name] - tensor).abs().max() <= span / 15 / 2 + 1e-6


def test_a_folder_is_loaded_whole_or_in_shards(llama: transformers.PreTrainedModel, tmp_path: Path) -> None:
    tensors = named_tensors(llama)
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        load_safetensors(tmp_path)
    names = sorted(tensors)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, members in shards.items():
        save_file({name: tensors[name] for name in members}, tmp_path / file)
    index = {"weight_map": {name: file for file, members in shards.items() for name in members}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    model = build_model(ModelConfig.from_hf(llama.config.to_dict()), load_safetensors(tmp_path), torch.float32)
    tokens = random_tokens(12)
    assert torch.equal(Sequences(model, tokens).advance({0: 12}), Sequences(own_model(llama), tokens).advance({0: 12}))


def test_gemma3_multimodal_names_and_config() -> None:
    reference = reference_model(FAMILIES["gemma 3"])
    text = reference.config.to_dict()
    config = ModelConfig.from_hf({"model_type": "gemma3", "text_config": text, "eos_token_id": [1, 106]})
    assert config.eos_token_ids == (1, 106)
    tensors = {f"language_model.{name}": tensor for name, tensor in named_tensors(reference).items()}
    model = build_model(config, tensors | {"vision_tower.x": torch.zeros(1)}, torch.float32)
    tokens = random_tokens(40)
    assert_same(Sequences(model, tokens).advance({0: 40}), reference_logits(reference, tokens))


def test_missing_and_unexpected_tensors_are_named(llama: transformers.PreTrainedModel) -> None:
    config = ModelConfig.from_hf(llama.config.to_dict())
    tensors = named_tensors(llama)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(ModelError, match=r"no tensor model\.layers\.1\.mlp\.up_proj\.weight"):
        build_model(config, tensors, torch.float32)
    tensors = named_tensors(llama) | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}
    build_model(config, dict(tensors), torch.float32)
    tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(48)
    with pytest.raises(ModelError, match=r"q_proj\.bias"):
        build_model(config, tensors, torch.float32)


class TestConfig:
    LLAMA31: dict[str, Any] = {  # noqa: RUF012
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
        "rope_scaling": {**LLAMA3_ROPE, "factor": 8.0},
        "torch_dtype": "bfloat16",
        "eos_token_id": [128001, 128008, 128009],
    }

    def test_transformers_4_style(self) -> None:
        config = ModelConfig.from_hf(self.LLAMA31)
        assert (config.rope.scaling, config.rope.theta, config.rope.factor) == ("llama3", 500000.0, 8.0)
        assert config.head_dim == 128
        assert config.dtype is torch.bfloat16
        assert config.kv_bytes_per_token() == 131072
        assert config.kv_bytes_per_token(torch.float32) == 262144

    def test_qwen2_window_is_off_unless_asked_for(self) -> None:
        raw = self.LLAMA31 | {"model_type": "qwen2", "sliding_window": 32768, "max_window_layers": 28}
        assert set(ModelConfig.from_hf(raw).layer_windows) == {None}
        windows = ModelConfig.from_hf(raw | {"use_sliding_window": True}).layer_windows
        assert windows == (None,) * 28 + (32768,) * 4

    def test_gemma3_as_google_writes_it(self) -> None:
        text = {
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "model_type": "gemma3_text",
            "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        }
        config = ModelConfig.from_hf({"model_type": "gemma3", "text_config": text})
        assert config.layer_windows[:7] == (1024,) * 5 + (None, 1024)
        assert config.local_rope is not None
        assert (config.rope.theta, config.rope.factor, config.local_rope.theta) == (1e6, 8.0, 1e4)
        assert (config.num_heads, config.num_kv_heads, config.head_dim) == (8, 4, 256)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"model_type": "mamba"}, "supported are llama, mistral"),
            ({"rope_scaling": {"rope_type": "longrope"}}, "rope scaling 'longrope'"),
            ({"hidden_act": "relu"}, "activation 'relu'"),
            ({"hidden_size": None}, "hidden_size"),
            ({"torch_dtype": "float7"}, "float7"),
            ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ],
    )
    def test_refuses_what_it_does_not_know(self, change: dict[str, Any], message: str) -> None:
        with pytest.raises(ModelError, match=message):
            ModelConfig.from_hf(self.LLAMA31 | change)
