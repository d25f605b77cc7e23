"""Tokenizers: ids, streams and chats, against transformers where there are real weights."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from dsde.core.errors import InvalidInput, ModelError
from dsde.models.embedded import embedded_target_path
from dsde.models.gguf import GGUFFile
from dsde.models.tokenizer import Tokenizer

USER = [{"role": "user", "content": "Hi"}]
TEXTS = [
    "Hello world, it's 12345 and don't I'LL",
    "def f(x):\n    return x ** 2  # 三\n\t\tif a != b:\n        pass\n",
    "héllo ñandú 日本語 😀👩‍👩‍👧‍👦 ",
    "   lots   of   space \n\n\n end  ",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|>",
    "a\r\nb\r\n\r\n\u00a0nbsp\u3000wide",
    "",
]


def byte_level_meta(pre: str = "gpt-2", more: dict[str, Any] | None = None) -> dict[str, Any]:
    """GGUF metadata of a vocabulary that knows every byte, a few merges and three special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = ["l l", "h e", "he ll", "Ġ Ġ", "Ġ 1", "1 2", "12 3", "123 4"]
    tokens = ["<|end|>", "<|start|>", *alphabet, *(merge.replace(" ", "") for merge in merges), "<tool>", "[PAD]"]
    kinds = [3, 3] + [1] * (len(alphabet) + len(merges)) + [4, 5]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        **(more or {}),
    }


def byte_level(pre: str = "gpt-2", more: dict[str, Any] | None = None) -> Tokenizer:
    return Tokenizer.from_gguf(byte_level_meta(pre, more), Path("model.gguf"))


def pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    return [tokenizer.token_text(i) for i in tokenizer.encode(text, add_special_tokens=False)]


def sentencepiece_like() -> Tokenizer:
    """A Llama 2 kind of tokenizer: spaces as ▁, bytes as <0xNN>, the first space dropped on decoding."""
    vocab = {"<s>": 0, "</s>": 1, "▁": 2, "▁a": 3, "b": 4, "▁cd": 5}
    vocab |= {f"<0x{byte:02X}>": 6 + byte for byte in range(256)}
    backend = tokenizers.Tokenizer(models.BPE(vocab, [], byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    return Tokenizer(backend, [1], None, {})


def test_pre_tokenizers_split_digits_each_in_its_way() -> None:
    assert pieces(byte_level("gpt-2"), "a  1234") == ["a", " ", " 1", "2", "3", "4"]
    assert pieces(byte_level("smollm"), "a  1234") == ["a", "  ", "1", "2", "3", "4"]
    assert pieces(byte_level("qwen2"), "a 1234") == ["a", " ", "1", "2", "3", "4"]
    assert pieces(byte_level("llama-bpe"), "1234") == ["123", "4"]
    assert pieces(byte_level("gpt-2"), "1234") == ["1234"]


def test_qwen_composes_characters_first() -> None:
    composed, decomposed = "\u00e9", "e\u0301"
    qwen, gpt2 = byte_level("qwen2"), byte_level("gpt-2")
    assert qwen.encode(decomposed) == qwen.encode(composed)
    assert gpt2.encode(decomposed) != gpt2.encode(composed)


def test_special_tokens_are_one_id_and_are_skipped_on_request() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("<|start|>hell<tool><|end|>")
    assert ids[0] == 1
    assert ids[-1] == 0
    assert len(ids) == 4
    assert tokenizer.decode(ids) == "hell<tool>"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|start|>hell<tool><|end|>"


def test_bos_is_added_only_where_the_file_asks() -> None:
    adding = byte_level(more={"tokenizer.ggml.add_bos_token": True})
    assert adding.encode("h")[0] == 1
    assert adding.encode("h", add_special_tokens=False)[0] != 1
    assert byte_level().encode("h")[0] != 1


def test_padding_is_no_token() -> None:
    meta = byte_level_meta()
    tokenizer = byte_level()
    assert tokenizer.vocab_size == len(meta["tokenizer.ggml.tokens"]) - 1
    assert tokenizer.token_text(tokenizer.vocab_size) == ""
    assert tokenizer.decode([10**6]) == ""


def test_eos_ids_come_from_every_key() -> None:
    assert byte_level().eos_token_ids == {0}
    assert byte_level(more={"tokenizer.ggml.eot_token_id": 5}).eos_token_ids == {0, 5}


def check_stream(tokenizer: Tokenizer, ids: list[int]) -> None:
    for skip in (True, False):
        stream = tokenizer.stream(skip_special_tokens=skip)
        given = [stream.push(token_id) for token_id in ids]
        assert "".join(given) + stream.flush() == tokenizer.decode(ids, skip_special_tokens=skip)


def test_a_stream_holds_back_a_character_cut_in_two() -> None:
    tokenizer = byte_level()
    stream = tokenizer.stream()
    ids = tokenizer.encode("a😀b")
    assert [stream.push(i) for i in ids] == ["a", "", "", "", "😀", "b"]
    cut = tokenizer.stream()
    assert [cut.push(i) for i in ids[:3]] == ["a", "", ""]
    assert cut.flush() == "\ufffd"


@pytest.mark.parametrize("make", [byte_level, sentencepiece_like])
def test_streamed_pieces_join_to_what_decode_gives(make: Any) -> None:
    tokenizer = make()
    rng = random.Random(0)
    real = tokenizer.encode("a 日本 😀👩‍👩‍👧‍👦 b cd\ufffd")
    for _ in range(500):
        noise = [rng.randrange(tokenizer.vocab_size + 3) for _ in range(rng.randrange(20))]
        check_stream(tokenizer, noise)
        start = rng.randrange(len(real))
        check_stream(tokenizer, real[start : start + rng.randrange(20)] + noise[:3] + real)


def test_a_stream_keeps_the_space_after_a_skipped_special_token() -> None:
    tokenizer = sentencepiece_like()
    stream = tokenizer.stream()
    assert [stream.push(i) for i in (3, 1, 5)] == ["a", "", " cd"]


def test_long_streams_do_not_slow_down() -> None:
    tokenizer = byte_level()
    stream = tokenizer.stream()
    for token_id in tokenizer.encode("some text " * 100):
        stream.push(token_id)
    assert len(stream._window) == 1


def test_chat_template_sees_what_hugging_face_templates_expect() -> None:
    template = (
        "{{ bos_token }}\n{% for m in messages %}\n    {% generation %}\n{{ m['role'] }}:{{ m.content | tojson }}"
        "{% endgeneration %}\n{% if loop.last %}{% break %}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}>{% endif %}{{ strftime_now('%Y')|length }}"
    )
    tokenizer = byte_level(more={"tokenizer.chat_template": template})
    messages = [{"role": "user", "content": "é <b>"}]
    assert tokenizer.apply_chat_template(messages) == '<|start|>\nuser:"é <b>">4'
    assert ">4" not in tokenizer.apply_chat_template(messages, add_generation_prompt=False)


@pytest.mark.parametrize(
    "messages",
    [[], "hi", {"role": "user"}, [1], [{"content": "x"}], [{"role": "user"}], [{"role": "user", "content": 3}]],
)
def test_malformed_messages_are_named(messages: Any) -> None:
    tokenizer = byte_level(more={"tokenizer.chat_template": "{{ messages[0].content }}"})
    with pytest.raises(InvalidInput, match=r"^messages"):
        tokenizer.apply_chat_template(messages)


def test_chat_errors_are_sentences() -> None:
    with pytest.raises(InvalidInput, match="no chat template"):
        byte_level().apply_chat_template(USER)
    picky = byte_level(more={"tokenizer.chat_template": "{{ raise_exception('only system first') }}"})
    with pytest.raises(InvalidInput, match=r"refuses these messages: only system first\.$"):
        picky.apply_chat_template(USER)
    broken = byte_level(more={"tokenizer.chat_template": "{% if %}"})
    with pytest.raises(ModelError, match="not valid Jinja"):
        broken.apply_chat_template(USER)


def test_a_template_cannot_leave_its_sandbox() -> None:
    escape = "{{ messages.__class__.__mro__[1].__subclasses__() }}"
    with pytest.raises(InvalidInput, match="unsafe"):
        byte_level(more={"tokenizer.chat_template": escape}).apply_chat_template(USER)


def test_same_as_ignores_padding_and_added_tokens_but_not_ids() -> None:
    base = byte_level()
    padded = byte_level_meta()
    padded["tokenizer.ggml.tokens"] += ["[PAD2]", "<think>"]
    padded["tokenizer.ggml.token_type"] += [5, 4]
    assert base.same_as(Tokenizer.from_gguf(padded, Path("m.gguf")))
    swapped = byte_level_meta()
    tokens = swapped["tokenizer.ggml.tokens"]
    tokens[50:52] = [tokens[51], tokens[50]]
    assert not base.same_as(Tokenizer.from_gguf(swapped, Path("m.gguf")))
    assert not base.same_as(sentencepiece_like())


def save_folder(folder: Path, **files: Any) -> Path:
    byte_level()._backend.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def test_from_folder_reads_the_files_beside_the_tokenizer(tmp_path: Path) -> None:
    save_folder(
        tmp_path,
        tokenizer_config={"eos_token": {"content": "<|end|>"}, "chat_template": "{{ eos_token }}old"},
        generation_config={"eos_token_id": [0, 7]},
    )
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.same_as(byte_level())
    assert tokenizer.eos_token_ids == {0, 7}
    assert tokenizer.apply_chat_template(USER) == "<|end|>old"
    (tmp_path / "chat_template.jinja").write_text("new")
    (tmp_path / "generation_config.json").unlink()
    again = Tokenizer.from_folder(tmp_path)
    assert again.apply_chat_template(USER) == "new"
    assert again.eos_token_ids == {0}


def test_broken_tokenizer_files_are_sentences(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"put the model's tokenizer\.json there"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match="not a tokenizer"):
        Tokenizer.from_folder(tmp_path)
    save_folder(tmp_path, tokenizer_config=[])
    with pytest.raises(ModelError, match="not a JSON object"):
        Tokenizer.from_folder(tmp_path)


def test_sentencepiece_gguf_takes_the_tokenizer_beside_it(tmp_path: Path) -> None:
    meta = byte_level_meta() | {"tokenizer.ggml.model": "llama"}
    with pytest.raises(ModelError, match=r"kind llama/gpt-2.*put the model's tokenizer\.json into"):
        Tokenizer.from_gguf(meta, tmp_path / "m.gguf")
    save_folder(tmp_path)
    assert Tokenizer.from_gguf(meta, tmp_path / "m.gguf").same_as(byte_level())


@pytest.fixture(scope="module")
def smollm() -> tuple[Path, Tokenizer]:
    path = embedded_target_path()
    if path is None:
        pytest.skip("the embedded SmolLM2 weights are not on this machine")
    return path, Tokenizer.from_gguf(GGUFFile(path).meta, path)


@pytest.mark.weights
@pytest.mark.filterwarnings("default")
def test_smollm_agrees_with_transformers(smollm: tuple[Path, Tokenizer], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    transformers = pytest.importorskip("transformers")
    path, tokenizer = smollm
    reference = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    chat = [*USER, {"role": "assistant", "content": "<b>"}, *USER]
    prompt = tokenizer.apply_chat_template(chat)
    assert prompt == reference.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    for text in [*TEXTS, prompt]:
        ids = tokenizer.encode(text)
        assert ids == reference.encode(text), text
        assert tokenizer.decode(ids) == reference.decode(ids, skip_special_tokens=True)
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
        check_stream(tokenizer, ids)


@pytest.mark.weights
def test_smollm_splits_digits_as_its_own_tokenizer_does(smollm: tuple[Path, Tokenizer]) -> None:
    # transformers' GGUF reader leaves the digit splitter out; the model was trained with it.
    _, tokenizer = smollm
    assert pieces(tokenizer, "x  12") == ["x", "  ", "1", "2"]
    assert tokenizer.eos_token_ids == {2}
    assert tokenizer.vocab_size == 49152
