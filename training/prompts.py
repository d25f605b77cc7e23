"""The prompts that the target answers: read from files, cut from texts, made from templates, or written by the target.

Reads a folder of public texts and a ShareGPT file where there is one. A prompt is a list of chat messages, or plain
text to go on with. Prompts that share a passage with a file kept for measuring are dropped.
"""

from __future__ import annotations

import json
import lzma
import multiprocessing
import os
import random
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from dsde.models.tokenizer import Tokenizer
from training import templates
from training.sampling import Corpus, Request

Message = dict[str, str]
_GAP = re.compile(r"[\s,]*")
_WINDOW = 10
"""words in a row that a prompt may not share with a text kept for measuring"""


@dataclass(frozen=True, slots=True)
class Prompt:
    """Messages of a chat, or text that is continued as it stands."""

    tag: str
    messages: tuple[tuple[str, str], ...] = ()
    text: str = ""

    def words(self) -> str:
        return " ".join(content for role, content in self.messages if role == "user") or self.text


def build_prompts(folder: Path, sharegpt: Path | None, excluded: Iterable[Path], seed: int) -> list[Prompt]:
    """All prompts that need no target to be written, in random order, each once."""
    rng = random.Random(seed)
    wiki = _wiki_paragraphs(folder / "wikitext2_valid.txt")
    prompts = [_chat("math", row["question"]) for row in _json_lines(folder / "gsm8k_train.jsonl")]
    documents = list(wiki)
    if sharegpt is not None:
        conversations = list(_sharegpt(sharegpt))
        prompts += [prompt for turns in conversations for prompt in _share_prompts(turns, rng)]
        documents += [
            " ".join(text.split())
            for turns in conversations
            for role, text in turns
            if role == "assistant" and len(text) > 900 and "```" not in text
        ]
        prompts += [_chat("translation", f"Translate German to English: {s}") for s in _german(conversations)]
    prompts += _document_prompts(documents, rng, 16_000)
    prompts += [_chat("qa", _trivia(rng.choice(documents), rng)) for _ in range(8000)]
    prompts += _text_prompts(folder, wiki, rng)
    prompts += _template_prompts(rng)
    prompts = list(dict.fromkeys(prompts))
    known = _windows(path.read_text("utf-8") for path in excluded)
    kept = [prompt for prompt in prompts if known.isdisjoint(_windows([prompt.words()]))]
    rng.shuffle(kept)
    return kept


def save_prompts(prompts: Sequence[Prompt], path: Path) -> None:
    with lzma.open(path, "wt", encoding="utf-8", preset=1) as out:
        json.dump([(prompt.tag, prompt.messages, prompt.text) for prompt in prompts], out)


def load_prompts(path: Path) -> list[Prompt]:
    with lzma.open(path, "rt", encoding="utf-8") as saved:
        rows = json.load(saved)
    return [Prompt(tag, tuple((role, content) for role, content in messages), text) for tag, messages, text in rows]


def ask_requests(tokenizer: Tokenizer, count: int, seed: int) -> list[Request]:
    """Requests that make the target write a user's turn: the chat template up to where the user speaks."""
    rng = random.Random(seed)
    head = tokenizer.apply_chat_template([{"role": "user", "content": "\0"}], add_generation_prompt=False)
    head = head[: head.index("\0")]
    requests = []
    for _ in range(count):
        opening = rng.choice(templates.OPENINGS)
        # A space at the end would be a token of its own, and the next word would begin without one.
        ids = tokenizer.encode(head + opening.rstrip(), add_special_tokens=False)
        requests.append(Request(ids, rng.choice((0.7, 0.9, 1.0, 1.0)), opening))
    return requests


def asked_prompts(tokenizer: Tokenizer, corpus: Corpus) -> list[Prompt]:
    """The user's turns that the target wrote, as prompts; what was cut off in mid-turn is used as well."""
    texts = (tag.rstrip() + tokenizer.decode(ids) for tag, ids in zip(corpus.tags, corpus.completions, strict=True))
    return list(dict.fromkeys(_chat("asked", text.strip()) for text in texts if len(text.strip()) > 8))


def followup_prompts(
    tokenizer: Tokenizer, prompts: Sequence[Prompt], answers: Sequence[str], seed: int
) -> list[Prompt]:
    """Another turn of answered chats; and German that the target wrote, to be translated back."""
    rng = random.Random(seed)
    following = []
    for prompt, answer in zip(prompts, answers, strict=True):
        if prompt.tag == "to_german":
            following.append(_chat("translation", f"Translate German to English: {answer}"))
        elif prompt.messages:
            turn = templates.fill(rng.choice(templates.FOLLOWUPS), rng)
            messages = (*prompt.messages, ("assistant", answer), ("user", turn))
            following.append(Prompt("followup", messages))
    return following


def to_requests(
    tokenizer: Tokenizer, prompts: Sequence[Prompt], temperatures: Sequence[float], max_prompt: int, seed: int
) -> list[Request]:
    """Tokenized prompts, each with a temperature drawn for it; those that are too long lose their oldest turns."""
    rng = random.Random(seed)
    cut = partial(_encode_within, tokenizer, max_prompt)
    # Processes, since tokenizing one text after another would take longer than answering them. Forked, since the
    # tokenizer does not survive pickling.
    global _shared
    _shared = cut
    with multiprocessing.get_context("fork").Pool(len(os.sched_getaffinity(0))) as pool:
        encoded = pool.map(_call_shared, prompts, chunksize=256)
    return [Request(ids, rng.choice(temperatures), str(index)) for index, ids in enumerate(encoded) if ids]


_shared: Callable[[Prompt], list[int]]


def _call_shared(prompt: Prompt) -> list[int]:
    return _shared(prompt)


def _encode_within(tokenizer: Tokenizer, max_prompt: int, prompt: Prompt) -> list[int]:
    """The prompt's tokens, without its oldest turns where it is too long; nothing where that does not help."""
    ids = encode(tokenizer, prompt)
    while len(ids) > max_prompt and len(prompt.messages) > 2:
        prompt = Prompt(prompt.tag, prompt.messages[2:])
        ids = encode(tokenizer, prompt)
    return ids if len(ids) <= max_prompt else []


def encode(tokenizer: Tokenizer, prompt: Prompt) -> list[int]:
    if not prompt.messages:
        return tokenizer.encode(prompt.text)
    messages = [{"role": role, "content": content} for role, content in prompt.messages]
    return tokenizer.encode(tokenizer.apply_chat_template(messages), add_special_tokens=False)


def _chat(tag: str, text: str) -> Prompt:
    return Prompt(tag, (("user", text),))


def _json_lines(path: Path) -> Iterator[dict[str, str]]:
    with path.open(encoding="utf-8") as lines:
        yield from map(json.loads, lines)


def _wiki_paragraphs(path: Path) -> list[str]:
    """Paragraphs of WikiText with its spaced punctuation and escapes undone."""
    lines = (line.strip() for line in path.read_text("utf-8").splitlines())
    return [_unescape(line) for line in lines if len(line) > 300 and not line.startswith("=")]


def _unescape(text: str) -> str:
    text = text.replace(" @-@ ", "-").replace(" @,@ ", ",").replace(" @.@ ", ".").replace("<unk>", "one")
    text = re.sub(r" ([,.;:?!)%])", r"\1", text)
    return re.sub(r"\( ", "(", text).replace(" 's", "'s").replace(" n't", "n't")


def _sharegpt(path: Path) -> Iterator[list[tuple[str, str]]]:
    """Conversations of a ShareGPT JSON file or of a wheel that holds one, as far as the file is whole."""
    text, decoder = _read_sharegpt(path), json.JSONDecoder()
    at = text.index("[") + 1
    while True:
        at = _GAP.match(text, at).end()
        try:
            item, at = decoder.raw_decode(text, at)
        except ValueError:
            return
        roles = {"human": "user", "gpt": "assistant"}
        turns = [(roles.get(turn["from"], ""), turn["value"].strip()) for turn in item["conversations"]]
        while turns and turns[0][0] != "user":
            turns.pop(0)
        if turns and all(role == ("user", "assistant")[i % 2] and text for i, (role, text) in enumerate(turns)):
            yield turns


def _read_sharegpt(path: Path) -> str:
    if path.suffix != ".whl":
        return path.read_text("utf-8")
    with zipfile.ZipFile(path) as wheel:
        name = next(name for name in wheel.namelist() if name.endswith(".json"))
        return wheel.read(name).decode("utf-8", "ignore")


def _share_prompts(turns: list[tuple[str, str]], rng: random.Random) -> list[Prompt]:
    """Up to three of the points at which the assistant had to speak, with all that was said before."""
    points = [i for i in range(0, len(turns), 2) if sum(len(text) for _, text in turns[: i + 1]) < 4500]
    return [Prompt("sharegpt", tuple(turns[: i + 1])) for i in rng.sample(points, min(3, len(points)))]


def _german(conversations: Iterable[list[tuple[str, str]]]) -> Iterator[str]:
    for turns in conversations:
        for _, text in turns:
            words = re.findall(r"\b(?:und|der|die|nicht|ist|ein|das)\b", text)
            if len(words) > 4 and not re.search(r"\b(?:the|and|of)\b", text):
                yield from (s for s in re.split(r"(?<=[.!?:])\s+", text) if 25 < len(s) < 300)


def _document_prompts(documents: list[str], rng: random.Random, count: int) -> list[Prompt]:
    """Summaries of one text; questions about one; several passages and a question, as retrieval gives them."""
    prompts = []
    for _ in range(count):
        document = _passage(rng.choice(documents), rng, rng.randint(400, 3600))
        subject = _subject(document, rng)
        kind = rng.random()
        if kind < 0.4:
            lead = rng.choice(("Summarize: ", "Summarize: ", "Summarize the following text:\n", "TL;DR: "))
            prompts.append(_chat("summary", lead + document))
        elif kind < 0.85:
            # Like retrieved text, passages may begin and end in mid-sentence.
            passages = [_passage(rng.choice(documents), rng, rng.randint(400, 800)) for _ in range(rng.randint(2, 4))]
            passages.insert(rng.randrange(len(passages) + 1), document[:700])
            question = rng.choice((_question(subject, rng), templates.fill(rng.choice(templates.QUESTIONS), rng)))
            prompts.append(_chat("rag", "\n".join(passages) + "\n" + question))
        else:
            prompts.append(_chat("reading", f"{document}\n\n{_question(subject, rng)}"))
    return prompts


def _passage(text: str, rng: random.Random, size: int) -> str:
    start = rng.randrange(max(1, len(text) - size)) if rng.random() < 0.5 else 0
    return text[start : start + size].strip()


def _subject(text: str, rng: random.Random) -> str:
    names = re.findall(r"\b[A-Z][a-z]+(?: [A-Z][a-z]+)+\b", text) or re.findall(r"\b[a-z]{6,}\b", text) or ["this"]
    return rng.choice(names)


def _trivia(document: str, rng: random.Random) -> str:
    """A short question without any context, about something that the document names."""
    forms = (
        "who is {}?", "what is {} known for?", "where is {}?", "when was {} founded?", "who was the first {}?",
        "when did {} come out?", "who played {} in the film?", "what does {} mean?", "how many {} are there?",
        "who wrote about {}?", "where does {} take place?", "when did {} end?", "what happened at {} in {year}?",
        "who is the owner of {}?", "which country is {} from?", "how long is {}?", "why did {} stop?",
    )  # fmt: skip
    return _vary(rng.choice(forms).format(_subject(document, rng), year=rng.randint(1850, 2020)), rng)


def _question(subject: str, rng: random.Random) -> str:
    forms = (
        "What does the text say about {}?", "Who is {}?", "What is {}?", "When did {} begin?", "Where is {}?",
        "Why is {} important?", "What happened to {}?", "who was {} in the story?", "how did {} become known?",
    )  # fmt: skip
    return rng.choice(forms).format(subject)


def _text_prompts(folder: Path, wiki: list[str], rng: random.Random) -> list[Prompt]:
    """Text to be continued without a chat, and sentences to be translated."""
    shakespeare = (folder / "tinyshakespeare.txt").read_text("utf-8")
    sonnets = (folder / "vllm_sonnet.txt").read_text("utf-8").splitlines()
    prompts = [Prompt("text", text=" ".join(rng.choice(wiki).split()[: rng.randint(8, 120)])) for _ in range(2500)]
    for _ in range(1500):
        start = rng.randrange(len(shakespeare) - 800)
        prompts.append(Prompt("text", text=shakespeare[start : start + rng.randint(60, 600)].partition("\n")[2] or "O"))
    for _ in range(300):
        start = rng.randrange(len(sonnets) - 14)
        lines = "\n".join(sonnets[start : start + rng.randint(2, 12)])
        prompts.append(_chat("prose", "Pick as many lines as you can from these poem lines:\n" + lines))
        prompts.append(Prompt("text", text=lines))
    sentences = [s for paragraph in wiki for s in re.split(r"(?<=\.) ", paragraph) if 30 < len(s) < 220]
    rng.shuffle(sentences)
    prompts += [_chat("to_german", f"Translate English to German: {s}") for s in sentences[:6000]]
    other = ("French", "Spanish", "Italian")
    prompts += [_chat("translation", f"Translate English to {rng.choice(other)}: {s}") for s in sentences[6000:7000]]
    return prompts


def _template_prompts(rng: random.Random) -> list[Prompt]:
    counts = {"chat": 9000, "code": 2000, "arithmetic": 4000, "qa": 9000}
    forms = dict(zip(counts, (templates.CHAT, templates.CODE, templates.ARITHMETIC, templates.QUESTIONS), strict=True))
    prompts = [
        _chat(tag, _vary(templates.fill(rng.choice(forms[tag]), rng), rng))
        for tag, count in counts.items()
        for _ in range(count)
    ]
    prompts += [Prompt("text", text=templates.code_prefix(rng)) for _ in range(1500)]
    prompts += [_chat("translation", _to_english(templates.german_sentence(rng), rng)) for _ in range(9000)]
    return prompts


def _vary(text: str, rng: random.Random) -> str:
    return text[0].upper() + text[1:] if rng.random() < 0.7 else text


def _to_english(sentence: str, rng: random.Random) -> str:
    forms = ("Translate German to English: {}", "Translate German to English: {}", "Translate to English: {}")
    return rng.choice(forms).format(sentence)


def _windows(texts: Iterable[str]) -> set[tuple[str, ...]]:
    """Every run of words, in lower case; a shorter text is one run."""
    found = set()
    for text in texts:
        words = re.findall(r"\w+", text.lower())
        if len(words) >= 5:
            found |= {tuple(words[i : i + _WINDOW]) for i in range(max(1, len(words) - _WINDOW + 1))}
    return found
