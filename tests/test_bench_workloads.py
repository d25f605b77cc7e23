"""What `dsde bench` asks: its own prompts, other benchmarks' files, orders and arrivals."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from dsde.bench.arrivals import parse_arrivals
from dsde.bench.readers import Prompt, read_prompts
from dsde.bench.workloads import KINDS, NAMES, load_workload
from dsde.core.errors import InvalidInput

SPEC_BENCH = [
    {"question_id": 81, "category": "writing", "turns": ["Write a post.", "Rewrite it."]},
    {"question_id": 82, "category": "translation", "turns": ["Translate: Guten Tag."]},
]
HUMAN_EVAL = [
    {"task_id": "HumanEval/0", "prompt": "def f():\n", "entry_point": "f", "test": "", "canonical_solution": ""}
]
GSM8K = [{"question": "How many ducks?", "answer": "#### 3"}]
SHARE_GPT = [
    {"id": "a", "conversations": [{"from": "human", "value": "Hello"}, {"from": "gpt", "value": "Hi"}]},
    {"id": "b", "conversations": [{"from": "gpt", "value": "cut off"}, {"from": "human", "value": "Why?"}]},
    {"id": "c", "conversations": [{"role": "user", "content": "Bye"}]},
]


def lines(rows: list[Any]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def test_there_are_many_prompts_of_every_kind_and_none_twice() -> None:
    mixed = load_workload("mixed", seed=0)
    assert len(mixed.prompts) >= 64  # enough for the largest batch of the presets
    assert set(Counter(prompt.kind for prompt in mixed.prompts)) == set(KINDS)
    assert min(Counter(prompt.kind for prompt in mixed.prompts).values()) >= 8
    everything = [prompt.text for name in NAMES[1:] for prompt in load_workload(name, 0).prompts]
    assert len(set(everything)) == len(everything)


def test_the_first_requests_of_a_mixture_cover_all_kinds() -> None:
    assert {prompt.kind for prompt in load_workload("mixed", seed=3).take(6)} == set(KINDS)


def test_a_seed_fixes_the_order() -> None:
    first, again, other = (load_workload("mixed", seed).prompts for seed in (1, 1, 2))
    assert first == again
    assert first != other
    assert sorted(first, key=str) == sorted(other, key=str)


def test_no_prompt_is_asked_twice() -> None:
    with pytest.raises(InvalidInput, match="workload chat has 12 prompts, which is fewer than 13"):
        load_workload("chat", 0).take(13)


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        (
            "spec.jsonl",
            lines(SPEC_BENCH),
            [Prompt("mt_bench", "Write a post."), Prompt("translation", "Translate: Guten Tag.")],
        ),
        ("HumanEval.jsonl", lines(HUMAN_EVAL), [Prompt("humaneval", "def f():\n")]),
        ("gsm8k_test.jsonl", lines(GSM8K), [Prompt("gsm8k_test", "How many ducks?")]),
        ("sharegpt.json", json.dumps(SHARE_GPT), [Prompt("sharegpt", "Hello"), Prompt("sharegpt", "Bye")]),
        ("own.jsonl", lines([{"kind": "haiku", "prompt": "Write."}]), [Prompt("haiku", "Write.")]),
    ],
)
@pytest.mark.parametrize("compressed", [False, True])
def test_files_of_other_benchmarks_are_read(
    name: str, content: str, expected: list[Prompt], compressed: bool, tmp_path: Path
) -> None:
    path = tmp_path / (f"{name}.gz" if compressed else name)
    path.write_bytes(gzip.compress(content.encode()) if compressed else content.encode())
    assert read_prompts(path) == expected
    assert set(load_workload(str(path), 0).prompts) == set(expected)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "is neither JSON lines nor a JSON list"),
        (b'{"text": 1}\n', "entry 1 is none of Spec-Bench"),
        (b'{"prompt": 1}\n', "entry 1 is none of Spec-Bench"),
        (b"[1]", "entry 1 is none of Spec-Bench"),
        (b"", "holds no prompts"),
        (b"\xff\xfe", "cannot be read"),
    ],
)
def test_what_cannot_be_read_is_named(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(content)
    with pytest.raises(InvalidInput, match=message):
        read_prompts(path)


def test_a_file_that_is_not_gzip_where_its_name_says_so(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl.gz"
    path.write_bytes(b"{}")
    with pytest.raises(InvalidInput, match="cannot be read"):
        read_prompts(path)


def test_arrivals_have_the_rate_that_was_asked_for() -> None:
    assert parse_arrivals("closed").times(3, seed=0) is None
    times = parse_arrivals("poisson:4").times(2000, seed=0)
    assert times is not None
    assert times == sorted(times)
    assert 2000 / times[-1] == pytest.approx(4, rel=0.1)
    assert times == parse_arrivals("poisson:4").times(2000, seed=0)
    assert times != parse_arrivals("poisson:4").times(2000, seed=1)


@pytest.mark.parametrize("spec", ["open", "poisson", "poisson:0", "poisson:-1", "poisson:nan", "poisson:x", "closed:1"])
def test_other_arrivals_are_refused(spec: str) -> None:
    with pytest.raises(InvalidInput, match="arrival must be closed or poisson:RATE"):
        parse_arrivals(spec)
