"""The draft that comes with dsde: what it proposes, and that other programs can use it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from dsde import ModelError, cli
from dsde.models.batch import pack
from dsde.models.decoder import Decoder
from dsde.models.embedded import embedded_target_path
from dsde.models.loader import LoadedModel, load_draft, load_model
from dsde.models.weights import TRIMMED_VOCAB, build_model
from tiny import tiny_model, tiny_tensors

TEXT = "The quick brown fox jumps over the lazy dog. def add(a, b):\n    return a + b\n1 + 1 = 2, so 2 + 2 ="


def logits_of(model: Decoder, tokens: list[int]) -> torch.Tensor:
    lengths = np.array([len(tokens)])
    blocks = list(range(-(-len(tokens) // 16)))
    return model.forward(
        pack(np.array(tokens), lengths, lengths, [blocks], None, torch.device("cpu")), model.new_cache(len(blocks))
    )


def test_a_trimmed_head_scores_only_its_tokens() -> None:
    """The same numbers as the whole head for tokens it has, and no chance for all others."""
    vocab = torch.tensor([5, 0, 40, 17], dtype=torch.int32)
    config = tiny_model().config
    tensors = tiny_tensors(64, seed=0)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    whole = build_model(config, dict(tensors), torch.float32)
    trimmed = build_model(config, tensors | {TRIMMED_VOCAB: vocab}, torch.float32)
    expected, actual = logits_of(whole, [1, 2, 3]), logits_of(trimmed, [1, 2, 3])
    assert actual.shape == expected.shape
    torch.testing.assert_close(actual[:, vocab.long()], expected[:, vocab.long()])
    others = [token for token in range(64) if token not in vocab.tolist()]
    assert bool((actual[:, others] == -torch.inf).all())


@pytest.fixture(scope="module")
def target() -> LoadedModel:
    if embedded_target_path() is None:
        pytest.skip("the embedded weights are not on this machine")
    return load_model(None)


@pytest.mark.weights
def test_it_agrees_with_the_target_most_of_the_time(target: LoadedModel) -> None:
    assert target.tokenizer is not None
    tokens = target.tokenizer.encode(TEXT * 4)
    ours, theirs = logits_of(load_draft("embedded", target).model, tokens), logits_of(target.model, tokens)
    assert (ours.argmax(-1) == theirs.argmax(-1)).float().mean() > 0.5


@pytest.mark.weights
def test_it_refuses_another_target(target: LoadedModel) -> None:
    other = LoadedModel("tiny", Path(), tiny_model(), None)
    with pytest.raises(ModelError, match=r"trained for SmolLM2-135M-Instruct"):
        load_draft("embedded", other)


@pytest.mark.weights
def test_exported_folders_give_the_same_logits_in_transformers(
    target: LoadedModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert cli.run(["models", "--export", str(tmp_path)]) == 0
    assert str(tmp_path / "draft") in capsys.readouterr().out
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "target")
    assert target.tokenizer is not None
    tokens = target.tokenizer.encode(TEXT)
    assert tokenizer(TEXT)["input_ids"] == tokens
    conversation = [{"role": "user", "content": "Hello"}]
    rendered = tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
    assert rendered == target.tokenizer.apply_chat_template(conversation)

    draft = load_draft("embedded", target).model
    assert draft.head_tokens is not None
    for folder, model, columns in (("target", target.model, slice(None)), ("draft", draft, draft.head_tokens)):
        exported = AutoModelForCausalLM.from_pretrained(tmp_path / folder, dtype=torch.float32)
        with torch.inference_mode():
            expected = exported(torch.tensor([tokens])).logits[0]
        difference = (logits_of(model, tokens) - expected)[:, columns].abs().max()
        # Logits of the target reach 38, and each program is about 1e-4 from a float64 run itself (see test_loader).
        assert difference < (2e-4 if folder == "target" else 1e-4)
    again = load_draft(str(tmp_path / "draft"), target)
    torch.testing.assert_close(
        logits_of(again.model, tokens)[:, draft.head_tokens], logits_of(draft, tokens)[:, draft.head_tokens]
    )
