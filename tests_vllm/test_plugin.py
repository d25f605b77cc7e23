"""What the plugin does to vLLM when it is not asked, and when it cannot work."""

from __future__ import annotations

import logging

import pytest

from conftest import MakeEngine, asking, speculation
from dsde.integrations.vllm import hooks, plugin


def test_inert_until_asked(make_engine: MakeEngine, pair: tuple[str, str]) -> None:
    target, draft = pair
    engine = make_engine(model=target, speculative_config=speculation(draft, 3))
    assert not hasattr(engine.core.scheduler, "dsde_controller")
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    assert len(engine.generate([{"prompt_token_ids": [5, 6, 7]}], params)[0]) == 20


def test_every_hook_is_as_expected() -> None:
    assert hooks.find_changes((*hooks.NEEDED, *hooks.FOR_GRAPHS, plugin.MAKE_SCHEDULER, plugin.MAKE_WORKER)) == []


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        ("statc:3", "unknown policy 'statc'"),
        ("svip", "ends drafts while they are made"),
        ("tetris:64", "would choose among it"),
        ("static:3|consultant", "lossless"),
    ],
)
def test_refuses_at_start(make_engine: MakeEngine, pair: tuple[str, str], policy: str, words: str) -> None:
    target, draft = pair
    with pytest.raises(Exception, match=words):
        make_engine(model=target, speculative_config=speculation(draft, 3), additional_config=asking(policy))


def test_refuses_without_a_draft(make_engine: MakeEngine, pair: tuple[str, str]) -> None:
    with pytest.raises(Exception, match="there is no draft; give vLLM a --speculative-config"):
        make_engine(model=pair[0], additional_config=asking("dsde"))


def test_refuses_two_who_choose(make_engine: MakeEngine, pair: tuple[str, str]) -> None:
    target, draft = pair
    table = speculation(draft, 3, num_speculative_tokens_per_batch_size=[[1, 16, 2]])
    with pytest.raises(Exception, match="leave one of them out"):
        make_engine(model=target, speculative_config=table, additional_config=asking("dsde"))


def test_policy_from_the_environment(
    make_engine: MakeEngine, pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DSDE_POLICY", "static:2")
    target, draft = pair
    engine = make_engine(model=target, speculative_config=speculation(draft, 3))
    assert engine.controller.policy.length == 2
    # One who does not speculate is left alone, whatever lies in the environment.
    make_engine(model=target)


def test_a_changed_vllm_goes_on_without_it(
    make_engine: MakeEngine, pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    other = hooks.Hook(hooks.SCHEDULER, "Scheduler", "update_from_output", ("something_else",))
    monkeypatch.setattr(hooks, "NEEDED", (*hooks.NEEDED, other))
    target, draft = pair
    with caplog.at_level(logging.WARNING, logger="vllm.dsde"):
        logging.getLogger("vllm.dsde").addHandler(caplog.handler)
        engine = make_engine(model=target, speculative_config=speculation(draft, 3), additional_config=asking("dsde"))
    assert "Scheduler.update_from_output takes" in caplog.text
    assert not hasattr(engine.core.scheduler, "dsde_controller")
