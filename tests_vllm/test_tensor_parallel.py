"""Two ranks: both draft what the scheduler decided, so that their collective passes match."""

from __future__ import annotations

import os
import random
from typing import Any

from conftest import MakeEngine, asking, speculation

# A core for each rank; vLLM looks at this once.
os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "0|1"


def test_two_ranks(make_engine: MakeEngine, pair: tuple[str, str]) -> None:
    from vllm import SamplingParams

    rng = random.Random(0)
    prompts = [{"prompt_token_ids": [rng.randrange(10, 500) for _ in range(rng.choice([2, 30]))]} for _ in range(10)]
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    target, draft = pair
    ranks: dict[str, Any] = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    plain = make_engine(model=target, **ranks).generate(prompts, params)
    engine = make_engine(
        model=target, speculative_config=speculation(draft, 6), additional_config=asking("dsde|gate"), **ranks
    )
    assert engine.generate(prompts, params) == plain
    meter = engine.controller.meter
    assert meter["num_draft_tokens"] > 20
    assert meter["mean_kld"] > 0
    assert meter["verify_s"] > 0
    assert len([count for count in meter.lengths if count]) >= 3
