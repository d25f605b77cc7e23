"""What is compiled beforehand is what vLLM does later, and leaves nothing behind."""

from __future__ import annotations

import pytest

from asynchronous import force_asynchronous
from conftest import MakeEngine, asking, speculation
from dsde.integrations.vllm.compiling import compile_all


def test_it_goes_through_all_of_a_draft_and_changes_nothing(make_engine: MakeEngine, pair: tuple[str, str]) -> None:
    from vllm import SamplingParams

    target, draft = pair
    prompts = [{"prompt_token_ids": list(range(10 + place, 30 + 3 * place))} for place in range(5)]
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    expected = make_engine(model=target).generate(prompts, params)
    engine = make_engine(
        model=target, speculative_config=speculation(draft, 5), additional_config=asking("static:3"), max_num_seqs=16
    )
    runner = engine.core.model_executor.driver_worker.worker.model_runner
    passes = []
    forward = runner.drafter.model.forward

    def counted(*args: object, **kwargs: object) -> object:
        passes.append(1)
        return forward(*args, **kwargs)

    runner.drafter.model.forward = counted
    compile_all(runner, runner.num_spec_tokens + 1)
    assert len(passes) == 3 * 6 * 5, "three batches, verifications of 1 to 6 tokens, drafts of 5"
    assert engine.generate(prompts, params) == expected
    assert engine.controller.meter["num_accepted_tokens"] > 0


def test_with_asynchronous_scheduling_nothing_is_left_to_compile(
    make_engine: MakeEngine, pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where vLLM puts positions right behind a verification, for one request and for several, before and after."""
    from torch._dynamo.utils import counters
    from vllm import SamplingParams

    force_asynchronous(monkeypatch)
    target, draft = pair
    engine = make_engine(
        model=target,
        speculative_config=speculation(draft, 3),
        additional_config=asking("static:2"),
        async_scheduling=True,
    )
    runner = engine.core.model_executor.driver_worker.worker.model_runner
    assert runner.use_async_spec_decode
    before = counters["frames"]["ok"]
    compile_all(runner, runner.num_spec_tokens + 1)
    compiled = counters["frames"]["ok"]
    assert compiled > before
    for lengths in ([20], [3, 9, 20], [4, 30], [40, 2, 2, 2, 2, 2, 2]):
        prompts = [{"prompt_token_ids": list(range(10 + place, 30 + place))} for place in range(len(lengths))]
        engine.generate(prompts, [SamplingParams(temperature=0, max_tokens=num, ignore_eos=True) for num in lengths])
    assert engine.controller.meter["num_accepted_tokens"] > 0
    assert counters["frames"]["ok"] == compiled
