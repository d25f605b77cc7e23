"""Engines of vLLM for the tests: real ones, on the CPU, in this process.

Starting one takes seconds, so tests share them; policies are changed while an engine runs.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_NO_USAGE_STATS="1",
    VLLM_LOGGING_LEVEL="WARNING",
    HF_HUB_OFFLINE="1",
)

import pytest

from pairs import write_pair

MakeEngine = Callable[..., "Engine"]


class Engine:
    """vLLM's `LLM`, with the plugin's parts at hand where it has any."""

    def __init__(self, **options: Any) -> None:
        from vllm import LLM

        defaults = {"dtype": "float32", "enforce_eager": True, "max_model_len": 512, "max_num_seqs": 16}
        self.llm: Any = LLM(**defaults | options)

    @property
    def core(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core

    @property
    def controller(self) -> Any:
        return self.core.scheduler.dsde_controller

    def obey(self, policy: str) -> None:
        """From now on, with nothing learnt."""
        from dsde.integrations.vllm import running, scheduling
        from dsde.integrations.vllm.settings import Settings

        os.environ["DSDE_POLICY"] = policy
        scheduling.steer(self.core.scheduler, Settings(policy=policy))
        runner = self.core.model_executor.driver_worker.worker.model_runner
        if hasattr(runner, running.ADAPTER):
            delattr(runner, running.ADAPTER)

    def generate(self, prompts: list[Any], params: Any) -> list[list[int]]:
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture(scope="module")
def make_engine() -> Iterator[MakeEngine]:
    """Engines that live as long as the module's tests."""
    engines: list[Engine] = []

    def make(**options: Any) -> Engine:
        engine = Engine(**options)
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.core.shutdown()
    engines.clear()
    gc.collect()


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSDE_POLICY", "")


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A target, and a draft that is right now and then."""
    return write_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="session")
def same_pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A target, and a draft that is always right."""
    return write_pair(tmp_path_factory.mktemp("same"), noise=0.0)


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """The embedded pair, as folders."""
    from dsde.models.export import export_pair

    target, draft = export_pair(Path(tmp_path_factory.mktemp("smollm2")))
    return str(target), str(draft)


def speculation(draft: str, length: int, **more: Any) -> dict[str, Any]:
    return {"method": "draft_model", "model": draft, "num_speculative_tokens": length, **more}


def asking(policy: str, **more: Any) -> dict[str, Any]:
    return {"dsde": {"policy": policy, **more}}
