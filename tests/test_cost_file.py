"""What a policy has learnt of seconds: in the trace of a step, and in a file from one run to the next."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest

from dsde import LLM, InvalidInput, SamplingParams, cli
from dsde.engine import executor
from dsde.policies import CostModel
from test_loader import make_folder
from tiny import make_engine, run, tiny_model

PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def make_llm(tmp_path: Path, policy: str = "goodput") -> LLM:
    folder = tmp_path / "target"
    target = folder if folder.exists() else make_folder(folder)
    return LLM(str(target), "noise:0.1", policy, kv_cache_bytes=1 << 20, cost_model=tmp_path / "cost.json")


def num_measured(llm: LLM) -> list[int]:
    return [model.num_measured for model in llm.policy.cost_models]


def test_what_was_learnt_outlives_the_engine(tmp_path: Path) -> None:
    llm = make_llm(tmp_path)
    assert num_measured(llm) == [0]
    llm.generate([[1, 2, 3]], PARAMS)
    learnt = llm.policy.cost_models[0].to_dict()
    assert num_measured(llm)[0] > 1
    assert not (tmp_path / "cost.json").exists()
    del llm
    gc.collect()
    assert json.loads((tmp_path / "cost.json").read_text()) == learnt
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["cost.json"]
    again = make_llm(tmp_path, "goodput|gate")
    assert num_measured(again) == [CostModel.from_dict(learnt).num_measured] * 2
    assert num_measured(again.with_policy("goodput")) == [0]


def test_an_engine_that_measured_nothing_writes_nothing(tmp_path: Path) -> None:
    make_llm(tmp_path)
    gc.collect()
    assert not (tmp_path / "cost.json").exists()


def test_it_is_saved_when_the_program_ends(tmp_path: Path) -> None:
    make_folder(tmp_path / "target")
    program = (
        "from dsde import LLM, SamplingParams\n"
        f"llm = LLM({str(tmp_path / 'target')!r}, 'noise:0.1', 'goodput', kv_cache_bytes=1 << 20, "
        f"cost_model={str(tmp_path / 'cost.json')!r})\n"
        "llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))\n"
        "raise SystemExit(7)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (7, "")
    assert CostModel.from_dict(json.loads((tmp_path / "cost.json").read_text())).num_measured > 1


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", '{"version": 2}', '{"version": 1, "verify": {"900": [1]}}', "\0"]
)
def test_a_file_that_holds_no_cost_model_is_one_sentence(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "cost.json").write_text(text)
    assert cli.run(["generate", "hi", "--policy", "goodput", "--cost-model", str(tmp_path / "cost.json")]) == 2
    message = capsys.readouterr().err
    assert message.startswith(f"dsde: {tmp_path / 'cost.json'} holds no cost model")
    assert message.count("\n") == 1
    assert (tmp_path / "cost.json").read_text() == text


@pytest.mark.parametrize(
    ("policy", "file", "message"),
    [
        ("static:4", "cost.json", "this policy does not look at seconds"),
        ("goodput", "missing/cost.json", "cannot be written"),
        ("goodput", ".", "cannot be written"),
    ],
)
def test_a_file_that_would_not_do_is_refused_before_the_work(
    policy: str, file: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidInput, match=message):
        LLM("no such target", policy=policy, cost_model=file)


def test_a_trace_says_what_the_cost_model_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = count()
    monkeypatch.setattr(executor, "time", SimpleNamespace(perf_counter=lambda: 0.004 * next(ticks)))
    engine = make_engine(tiny_model(seed=1), tiny_model(seed=1, noise=0.2), "static:2|gate")
    number = engine.add([1, 2, 3], SamplingParams(temperature=0, max_tokens=60), trace=True)
    trace = run(engine)[number].metrics.trace
    assert trace is not None
    first = trace[0]
    prior = first.drafted * 0.001, 0.01
    assert (first.expected_draft_s, first.expected_verify_s) == pytest.approx(prior)
    assert all(record.expected_draft_s == 0 for record in trace if not record.drafted)
    settled = [record for record in trace[-8:] if record.drafted != 1]  # by this clock a pass less saves nothing
    for record in settled:
        measured = record.draft_s if record.drafted else 0.0, record.verify_s
        assert (record.expected_draft_s, record.expected_verify_s) == pytest.approx(measured, rel=0.05)
    assert any(record.drafted for record in settled)
    assert engine.policy.cost_model is not None


def test_a_policy_without_a_cost_model_expects_nothing() -> None:
    engine = make_engine(tiny_model(seed=1), tiny_model(seed=1, noise=0.2), "static:2")
    number = engine.add([1, 2, 3], PARAMS, trace=True)
    trace = run(engine)[number].metrics.trace
    assert trace is not None
    assert {(record.expected_draft_s, record.expected_verify_s) for record in trace} == {(None, None)}
    assert engine.policy.cost_model is None
