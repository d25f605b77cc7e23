"""Steps without drafts, for a pair whose attention is unlike: vLLM prepares the draft's apart from the target's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from asynchronous import force_asynchronous
from conftest import MakeEngine, asking, speculation
from dsde.integrations.vllm.omission import find_target_groups
from pairs import HEADS, random_tensors, write_model
from test_catch_up import Scripted


@pytest.mark.parametrize("is_async", [False, True])
def test_the_draft_is_prepared_only_where_it_runs(
    make_engine: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_async: bool
) -> None:
    from vllm import SamplingParams

    if is_async:
        force_asynchronous(monkeypatch)
    tensors = random_tensors(0)
    target = str(write_model(tmp_path / "target", tensors))
    draft = str(write_model(tmp_path / "draft", tensors, num_heads=HEADS // 2))
    prompts = [{"prompt_token_ids": list(range(10 + place, 30 + 3 * place))} for place in range(6)]
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    expected = make_engine(model=target).generate(prompts, params)

    engine = make_engine(
        model=target,
        speculative_config=speculation(draft, 5),
        additional_config=asking("static:1"),
        async_scheduling=is_async,
    )
    engine.controller.policy = policy = Scripted()
    runner = engine.core.model_executor.driver_worker.worker.model_runner
    names, forward, is_speculating = [], runner._model_forward, []

    def watch(*args: Any, **kwargs: Any) -> Any:
        from vllm.forward_context import get_forward_context

        names.append(set(get_forward_context().attn_metadata))
        is_speculating.append(runner.speculative_config is not None)
        return forward(*args, **kwargs)

    monkeypatch.setattr(runner, "_model_forward", watch)
    assert engine.generate(prompts, params) == expected
    assert policy.outcomes
    of_both, of_target = max(names, key=len), min(names, key=len)
    assert of_target < of_both
    assert not any("draft" in name for name in of_target)
    assert 20 < names.count(of_target) <= engine.controller.meter["num_off_steps"]
    # Where nobody drafts, vLLM speculates no more than without a draft; before and behind it does as ever.
    assert is_speculating == [found != of_target for found in names]
    assert runner.speculative_config is not None
    assert [len(groups) for groups in find_target_groups(runner)] == [len(groups) - 1 for groups in runner.attn_groups]
