"""CUDA graphs of the draft: whoever fills one, or a part of one, drafts what vLLM's pieces draft. On a GPU alone."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from conftest import Engine, MakeEngine, asking, speculation
from test_catch_up import Scripted

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
]

BATCHES = (1, 3, 5, 8, 12)
"""some are sizes of graphs, some lie between them"""


@pytest.fixture(scope="module")
def engines(make_engine: MakeEngine, same_pair: tuple[str, str]) -> dict[bool, Engine]:
    """With the plugin's graphs and without."""
    target, draft = same_pair
    return {
        has_graphs: make_engine(
            model=target,
            speculative_config=speculation(draft, 4),
            additional_config=asking("static:4", graphs=has_graphs),
            dtype="bfloat16",
            enforce_eager=False,
            async_scheduling=True,
            enable_prefix_caching=False,
            gpu_memory_utilization=0.05,
            kv_cache_memory_bytes=1 << 28,
        )
        for has_graphs in (False, True)
    }


@pytest.fixture
def num_replayed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """[passes] requests of each that ran as a graph."""
    from dsde.integrations.vllm.draft_graphs import DraftGraphs

    replayed: list[int] = []
    replay = DraftGraphs._replay

    def counted(graphs: DraftGraphs, graph: Any, metadata: Any) -> torch.Tensor:
        replayed.append(metadata.seq_lens.shape[0])
        return replay(graphs, graph, metadata)

    monkeypatch.setattr(DraftGraphs, "_replay", counted)
    return replayed


def run(engine: Engine, batch: int) -> list[list[int]]:
    from vllm import SamplingParams

    rng = random.Random(batch)
    prompts = [[rng.randrange(10, 500) for _ in range(rng.choice([2, 3, 17, 40, 90]))] for _ in range(batch)]
    params = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
    return engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)


@pytest.mark.parametrize("policy", ["static:1", "static:2", "static:4"])
def test_nearly_all_stand(engines: dict[bool, Engine], num_replayed: list[int], policy: str) -> None:
    """The draft is its target: what falls differs by rounding, in batches of other shapes."""
    engine = engines[True]
    engine.obey(policy)
    for batch in BATCHES:
        num_replayed.clear()
        run(engine, batch)
        assert num_replayed.count(batch) > 5
    meter = engine.controller.meter
    assert meter["num_draft_tokens"] > 500
    assert meter["num_accepted_tokens"] > 0.97 * meter["num_draft_tokens"]


@pytest.mark.parametrize("policy", ["static:2", "static:4"])
def test_like_vllms_pieces(engines: dict[bool, Engine], policy: str) -> None:
    accepted = {}
    for has_graphs, engine in engines.items():
        engine.obey(policy)
        for batch in BATCHES:
            run(engine, batch)
        meter = engine.controller.meter
        accepted[has_graphs] = meter["num_accepted_tokens"] / meter["num_draft_tokens"]
    assert accepted[True] == pytest.approx(accepted[False], abs=0.02)


def test_pauses_and_ragged_batches(engines: dict[bool, Engine], num_replayed: list[int]) -> None:
    """Passes that fit no graph, and those that do, read one another's cache."""
    engine = engines[True]
    engine.obey("static:1")
    engine.controller.policy = policy = Scripted()
    for batch in BATCHES:
        run(engine, batch)
    drafted, accepted = (
        sum(int(getattr(outcome, name).sum()) for outcome in policy.outcomes) for name in ("drafted", "accepted")
    )
    assert num_replayed
    assert accepted > 0.97 * drafted > 0


def test_wrong_lengths_are_seen(engines: dict[bool, Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    """That the tests above can fail."""
    from dsde.integrations.vllm.draft_graphs import DraftGraphs

    replay = DraftGraphs._replay

    def stale(graphs: DraftGraphs, graph: Any, metadata: Any) -> torch.Tensor:
        metadata.seq_lens = torch.ones_like(metadata.seq_lens)
        return replay(graphs, graph, metadata)

    monkeypatch.setattr(DraftGraphs, "_replay", stale)
    engine = engines[True]
    engine.obey("static:4")
    run(engine, 8)
    meter = engine.controller.meter
    assert meter["num_accepted_tokens"] < 0.9 * meter["num_draft_tokens"]
