"""The command line as a person uses it: what it prints, and how it ends."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dsde import cli
from dsde.engine import engine
from dsde.engine.memory import count_blocks
from dsde.models.embedded import embedded_target_path

weights = [
    pytest.mark.weights,
    pytest.mark.skipif(embedded_target_path() is None, reason="the embedded weights are not on this machine"),
]


def has_weights(test: object) -> object:
    for mark in weights:
        test = mark(test)
    return test


@pytest.fixture(autouse=True)
def little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """For short texts: to fill a gigabyte with zeros takes longer than they do."""
    monkeypatch.setattr(engine, "count_blocks", lambda *args: min(count_blocks(*args), 64))


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["generate"], 2, "Missing argument"),
        (["generate", "hi", "--nonsense"], 2, "No such option: --nonsense"),
        (["frobnicate"], 2, "No such command 'frobnicate'"),
        (["generate", "hi", "--max-tokens", "many"], 2, "--max-tokens"),
        (["generate", "hi", "--max-tokens", "0"], 2, "max_tokens must be a whole number at least 1, got 0"),
        (["generate", "hi", "--temperature", "-1"], 2, "temperature must be"),
        (["generate", "hi", "--top-p", "3"], 2, "top_p must be"),
        (["generate", ""], 2, "The prompt is empty"),
        (["generate", "hi", "--policy", "fastest"], 2, "unknown policy 'fastest'; known are"),
        (["generate", "hi", "--policy", "static:x"], 2, "static"),
        (["generate", "hi", "--speculative-config", "{"], 2, "not valid JSON"),
        (["generate", "hi", "--speculative-config", '{"modle": "ngram"}'], 2, "no key 'modle'"),
        (["generate", "hi", "--dtype", "int3"], 2, "dtype must be one of"),
        (["generate", "hi", "--device", "toaster"], 2, "toaster"),
        (["generate", "hi", "--target", "/no/such/model"], 1, "/no/such/model"),
        (["generate", "hi", "--trace", "/no/such/folder/t.jsonl"], 2, "cannot be written"),
        (["demo", "--num-prompts", "9"], 2, "--num-prompts"),
    ],
)
def test_wrong_use_is_one_sentence(
    arguments: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(arguments) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert captured.err.startswith("dsde: ")
    assert captured.err.count("\n") == 1
    assert captured.err.endswith(".\n")
    assert "Traceback" not in captured.err


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(command in text for command in ("demo", "generate", "simulate", "policies", "models"))


def test_policies(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["policies"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for name in ("off", "static", "dsde", "| meancap"):
        assert any(line.startswith(name) and "lossless" in line for line in lines), name


def test_models(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert cli.run(["models"]) == 0
    assert "SmolLM2-135M-Instruct" in capsys.readouterr().out


@has_weights
def test_generate_streams_text_and_explains_itself(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    assert cli.run(["generate", "Name three colours.", "--max-tokens", "24", "--trace", str(trace)]) == 0
    captured = capsys.readouterr()
    assert len(captured.out) > 20
    assert "24 tokens in" in captured.err or "ended by stop" in captured.err
    assert "draft" in captured.err
    records = [json.loads(line) for line in trace.read_text().splitlines()]
    keys = {"klds", "predicted", "cap", "drafted", "accepted", "signals", "step_s"}
    assert records
    assert all(keys <= set(record) for record in records)
    assert {"outlook", "gain_of_next", "cost_of_token"} <= set(records[0]["signals"])


@has_weights
def test_json_and_standard_input(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("Name three colours.\n"))
    arguments = ["generate", "-", "--json", "--max-tokens", "12", "--policy", "static:2"]
    assert cli.run(arguments) == 0
    piped = json.loads(capsys.readouterr().out)
    assert cli.run(["generate", "Name three colours.", *arguments[2:]]) == 0
    given = json.loads(capsys.readouterr().out)
    assert piped["token_ids"] == given["token_ids"]
    assert piped["metrics"]["num_draft_tokens"] > 0


@has_weights
def test_policies_do_not_change_the_text(capsys: pytest.CaptureFixture[str]) -> None:
    texts = set()
    for extra in (["--policy", "off"], ["--policy", "static:3"], [], ["--draft", "ngram"], ["--draft", "none"]):
        assert cli.run(["generate", "What is rain?", "--max-tokens", "16", *extra]) == 0
        texts.add(capsys.readouterr().out)
    assert len(texts) == 1


@has_weights
def test_a_demo_compares_the_modes(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["demo", "--max-tokens", "12", "--num-prompts", "2", "--batch-size", "2"]) == 0
    text = capsys.readouterr().out
    assert "identical" in text
    for name in ("off", "static:3", "dsde", "auto", "outlook", "tokens/s"):
        assert name in text


@has_weights
def test_interrupt_ends_cleanly() -> None:
    command = [sys.executable, "-m", "dsde", "generate", "Tell me a long story.", "--max-tokens", "2000"]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        # Whatever a shell starts in the background ignores interrupts, and so would whatever that starts.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout is not None
    process.stdout.read(1)
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    rest, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert rest.endswith("\n")
    assert errors.strip() == ""


@has_weights
def test_a_reader_that_leaves_causes_no_traceback() -> None:
    command = f"{sys.executable} -m dsde generate 'Tell me a long story.' --max-tokens 20 | head -c 1"
    result = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert "Traceback" not in result.stderr
    assert "Broken" not in result.stderr
