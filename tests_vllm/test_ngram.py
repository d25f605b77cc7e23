"""Prompt lookup: it has no distribution, so policies work that look at acceptance and time alone."""

from __future__ import annotations

import random

from conftest import MakeEngine, asking


def test_same_output(make_engine: MakeEngine, pair: tuple[str, str]) -> None:
    from vllm import SamplingParams

    rng = random.Random(0)
    prompts = [{"prompt_token_ids": [rng.randrange(10, 30) for _ in range(40)]} for _ in range(8)]
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    plain = make_engine(model=pair[0]).generate(prompts, params)
    lookup = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    engine = make_engine(model=pair[0], speculative_config=lookup, additional_config=asking("gammatune:3"))
    assert engine.generate(prompts, params) == plain
    assert engine.controller.meter["num_draft_tokens"] > 10
    for policy in ("goodput", "static:2|gate", "auto"):
        engine.obey(policy)
        assert engine.generate(prompts, params) == plain
