"""What is compiled beforehand is what vLLM does later, and leaves nothing behind."""

from __future__ import annotations

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
