"""Greedy output under the plugin is that of vLLM without speculation: 50 mixed requests of the embedded pair."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

import dsde
from asynchronous import force_asynchronous
from conftest import Engine, MakeEngine, asking, speculation
from dsde.core.outputs import StepRecord

POLICIES = ["static:3", "dsde", "auto", "goodput", "dsde|gate", "nightjar", "ucbspec", "goodput:per=sequence"]


def requests(num: int) -> tuple[list[Any], list[Any]]:
    """Prompts of all kinds and lengths, some twice, one of a single token; answers of 1 to 40 tokens."""
    from vllm import SamplingParams

    lines = (Path(dsde.__file__).parent / "bench" / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    texts = [json.loads(line)["prompt"][:400] for line in lines if "prompt" in json.loads(line)]
    rng = random.Random(1)
    prompts: list[Any] = [{"prompt": rng.choice(texts)} for _ in range(num - 1)]
    prompts.append({"prompt_token_ids": [504]})
    lengths = [rng.choice([1, 7, 20, 40]) for _ in prompts]
    return prompts, [SamplingParams(temperature=0, max_tokens=length, ignore_eos=True) for length in lengths]


@pytest.fixture(scope="module")
def expected(make_engine: MakeEngine, smollm2: tuple[str, str]) -> list[list[int]]:
    return make_engine(model=smollm2[0]).generate(*requests(50))


@pytest.fixture(scope="module")
def engine(make_engine: MakeEngine, smollm2: tuple[str, str]) -> Engine:
    target, draft = smollm2
    return make_engine(model=target, speculative_config=speculation(draft, 6), additional_config=asking("dsde"))


@pytest.mark.parametrize("policy", POLICIES)
def test_same_output(engine: Engine, expected: list[list[int]], policy: str) -> None:
    engine.obey(policy)
    controller = engine.controller
    assert engine.generate(*requests(50)) == expected
    meter = controller.meter
    assert meter["num_draft_tokens"] >= meter["num_accepted_tokens"] > 20
    assert len(controller.slots) == len(controller.backlog) == len(controller._steps) == 0


def test_records(engine: Engine, tmp_path: Path) -> None:
    """Ragged lengths in one batch, KLDs of every verified token, and why: as our own engine's trace says it."""
    from dsde.integrations.vllm.trace import TraceWriter

    engine.obey("dsde")
    engine.controller._trace = TraceWriter(str(tmp_path / "trace.jsonl"))
    engine.generate(*requests(24))
    lines = (tmp_path / "trace.jsonl").read_text(encoding="utf-8").splitlines()
    records = [StepRecord(**json.loads(line)) for line in lines]
    by_step: dict[int, set[int]] = {}
    for record in records:
        by_step.setdefault(record.step, set()).add(record.drafted)
        assert len(record.klds) == record.drafted >= record.accepted
        assert record.drafted <= record.planned
        assert all(0 <= kld < 19 for kld in record.klds)
        # What stood whole agreed more than what fell at once, or the KLDs are not those of these tokens.
    whole = [sum(one.klds) / one.drafted for one in records if one.drafted and one.accepted == one.drafted]
    none = [one.klds[0] for one in records if one.drafted and one.accepted == 0]
    assert sum(whole) / len(whole) < 0.5 * sum(none) / len(none)
    assert any(len(lengths) > 1 for lengths in by_step.values())
    assert any(record.signals.get("scale_factor") is not None for record in records)
    assert any(record.cap is not None for record in records)
    assert all(record.verify_s > 0 for record in records)
    assert any(record.draft_s > 0 for record in records)


@pytest.mark.parametrize("policy", ["dsde", "auto"])
def test_same_output_with_asynchronous_scheduling(
    make_engine: MakeEngine, pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    from vllm import SamplingParams

    rng = random.Random(0)
    prompts = [{"prompt_token_ids": [rng.randrange(10, 500) for _ in range(rng.choice([1, 3, 30]))]} for _ in range(30)]
    params = [SamplingParams(temperature=0, max_tokens=rng.choice([2, 20, 60]), ignore_eos=True) for _ in prompts]
    target, draft = pair
    plain = make_engine(model=target).generate(prompts, params)
    force_asynchronous(monkeypatch)
    options = {"speculative_config": speculation(draft, 6), "additional_config": asking(policy)}
    engine = make_engine(model=target, async_scheduling=True, **options)
    assert engine.controller.limits.num_in_flight == 2
    assert engine.generate(prompts, params) == plain
    assert engine.controller.meter["num_draft_tokens"] > 20
    assert len(engine.controller.slots) == 0
