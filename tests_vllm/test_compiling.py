"""What is compiled beforehand is what vLLM does later, and leaves nothing behind."""

from __future__ import annotations

from itertools import pairwise

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


@pytest.mark.parametrize("max_num_seqs", [2, 3, 16])
def test_with_asynchronous_scheduling_nothing_is_left_to_compile(
    max_num_seqs: int, make_engine: MakeEngine, pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where vLLM puts positions right behind a verification, for one request and for several, before and after."""
    import torch
    from torch._dynamo.utils import counters
    from vllm import SamplingParams

    force_asynchronous(monkeypatch)
    torch._dynamo.reset()
    target, draft = pair
    engine = make_engine(
        model=target,
        speculative_config=speculation(draft, 3),
        additional_config=asking("static:2"),
        async_scheduling=True,
        max_num_seqs=max_num_seqs,
    )
    runner = engine.core.model_executor.driver_worker.worker.model_runner
    assert runner.use_async_spec_decode
    before = counters["frames"]["ok"]
    compile_all(runner, runner.num_spec_tokens + 1)
    compiled = counters["frames"]["ok"]
    assert compiled > before
    vllm, nums, steps = engine.llm.llm_engine, [], 0
    joining = {0: (0, 60), 5: (1, 20), 25: (2, 20), 26: (3, 8), 27: (4, 12)}
    while joining or vllm.has_unfinished_requests():
        if steps in joining:
            number, num_tokens = joining.pop(steps)
            params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
            vllm.add_request(str(number), {"prompt_token_ids": list(range(10 + number, 30 + number))}, params)
        vllm.step()
        nums.append(len(engine.core.scheduler.running))
        steps += 1
    assert max(nums) >= min(max_num_seqs, 3)
    assert {(1, 1), (1, 2), (2, 2), (2, 1)} <= set(pairwise(nums))
    assert engine.controller.meter["num_accepted_tokens"] > 0
    assert counters["frames"]["ok"] == compiled
