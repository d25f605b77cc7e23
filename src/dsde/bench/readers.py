"""Prompts out of files as other benchmarks publish them: Spec-Bench, HumanEval, GSM8K, ShareGPT, and our own form.

A file is JSON lines or one JSON list, gzipped or not; which benchmark it is shows in the fields of a row. Only the
first question of a conversation is used. Knows nothing of models and tokens.
"""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsde.core.errors import InvalidInput

MT_BENCH = frozenset({"writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"})
"""subjects of MT-Bench, which are one task of Spec-Bench"""


@dataclass(frozen=True, slots=True)
class Prompt:
    kind: str
    """what sort of text it asks for: a task of a benchmark, or one of our own kinds"""
    text: str


def read_prompts(path: Path) -> list[Prompt]:
    """Every prompt of a file, in its order."""
    prompts = []
    for number, row in enumerate(_rows(path), start=1):
        prompt = _prompt(row, path)
        if prompt is None:
            raise InvalidInput(
                f"{path}: entry {number} is none of Spec-Bench (turns), HumanEval or ours (prompt), GSM8K (question) "
                f"and ShareGPT (conversations)"
            )
        if prompt.text.strip():
            prompts.append(prompt)
    if not prompts:
        raise InvalidInput(f"{path} holds no prompts")
    return prompts


def _rows(path: Path) -> list[Any]:
    try:
        content = path.read_bytes()
        text = (gzip.decompress(content) if path.suffix == ".gz" else content).decode("utf-8")
    except (OSError, EOFError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text, or not gzip where its name says so"
        raise InvalidInput(f"{path} cannot be read: {reason}") from None
    try:
        if text.lstrip().startswith("["):
            rows = json.loads(text)
        else:
            rows = [json.loads(line) for line in text.splitlines() if line.strip()]
    except ValueError as error:
        raise InvalidInput(f"{path} is neither JSON lines nor a JSON list: {error}") from None
    return list(rows)


def _prompt(row: Any, path: Path) -> Prompt | None:
    """None for a row of no known form."""
    if not isinstance(row, dict):
        return None
    stem = path.name.partition(".")[0].lower()
    kind = str(row.get("kind", row.get("category", stem)))
    texts: list[Any] = []
    if isinstance(row.get("turns"), list):
        kind = "mt_bench" if kind in MT_BENCH else kind
        texts = row["turns"]
    elif "prompt" in row:
        kind = "humaneval" if "entry_point" in row else kind
        texts = [row["prompt"]]
    elif "question" in row:
        texts = [row["question"]]
    elif isinstance(row.get("conversations"), list):
        turns = [turn for turn in row["conversations"] if isinstance(turn, dict)]
        # Conversations that begin with an answer were cut in two by those who collected them.
        asks = bool(turns) and turns[0].get("from", turns[0].get("role")) in ("human", "user")
        texts = [turns[0].get("value", turns[0].get("content")) if asks else ""]
    return Prompt(kind, texts[0]) if texts and isinstance(texts[0], str) else None
