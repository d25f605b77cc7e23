"""What the plugin leaves out of steps in which nobody drafts, with parts like vLLM's; without vLLM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dsde.integrations.vllm import running, scheduling
from dsde.integrations.vllm.messages import CatchUp, Directive, attach, attached
from dsde.integrations.vllm.settings import Settings


class Runner:
    """vLLM's, as far as it prepares a step: a target with two groups of attention layers, a draft with one."""

    def __init__(self, *groups: list[str], method: str = "draft_model", is_hybrid: bool = False) -> None:
        self.speculative_config: Any = SimpleNamespace(method=method)
        self.vllm_config = SimpleNamespace(kv_transfer_config=None)
        self.model_config = SimpleNamespace(is_hybrid=is_hybrid)
        self.device = torch.device("cpu")
        self.attn_groups = [[SimpleNamespace(layer_names=names) for names in groups]]
        self.drafter = SimpleNamespace(draft_attn_groups=[SimpleNamespace(layer_names=["d0", "d1"])])
        self.dsde_adapter = running.RunnerAdapter(self, Settings(policy="off"))

    def output(self, longest: int = 0, catch_up: bool = False, drafts: Any = None, is_timed: bool = True) -> Any:
        """vLLM's scheduler's."""
        pieces = [CatchUp("r", 0, [1, 2])] if catch_up else []
        output = SimpleNamespace(
            num_spec_tokens_to_schedule=longest,
            scheduled_spec_decode_tokens=drafts or {},
            total_num_scheduled_tokens=1,
        )
        attach(output, Directive(int(is_timed), {"r": longest}, longest, pieces))
        return output

    def begin(self, **given: Any) -> None:
        output = self.output(**given)
        self.dsde_adapter.begin(output, attached(output))

    def execute(self, output: Any) -> Any:
        return running.execute(Runner.note, self, output)

    def sample(self) -> Any:
        return running.sample_tokens(Runner.note, self, None)

    def note(self, message: Any) -> Any:
        """As vLLM's methods: whether it speculates, and groups for which attention metadata is made."""
        groups = [group.layer_names for part in self.attn_groups for group in part]
        return SimpleNamespace(speculates=self.speculative_config is not None, groups=groups)


def in_step(runner: Runner, **given: Any) -> tuple[bool, list[list[str]]]:
    """What all of a step goes by; and that nothing of it is left behind."""
    everything, speculative = runner.attn_groups, runner.speculative_config
    executed, sampled = runner.execute(runner.output(**given)), runner.sample()
    assert (executed.speculates, executed.groups) == (sampled.speculates, sampled.groups)
    assert runner.attn_groups is everything
    assert runner.speculative_config is speculative is not None
    return executed.speculates, executed.groups


def test_nothing_is_done_for_a_draft_that_is_left_out() -> None:
    runner = Runner(["t0", "t1"], ["t2"], ["d0", "d1"])
    everything = [["t0", "t1"], ["t2"], ["d0", "d1"]]
    assert in_step(runner, longest=2) == (True, everything)
    assert in_step(runner, catch_up=True) == (True, everything)
    assert in_step(runner) == (False, everything[:2])
    assert in_step(runner, longest=1) == (True, everything)


def test_drafts_of_the_step_before_are_verified_as_ever() -> None:
    runner = Runner(["t0"], ["d0", "d1"])
    assert in_step(runner, drafts={"r": [-1, -1]}) == (True, [["t0"], ["d0", "d1"]])


def test_a_recurrent_target_goes_as_ever() -> None:
    assert in_step(Runner(["t0"], ["d0", "d1"], is_hybrid=True)) == (True, [["t0"], ["d0", "d1"]])


def test_a_draft_that_must_run_in_every_step_does() -> None:
    assert in_step(Runner(["t0"], ["d0", "d1"], method="eagle")) == (True, [["t0"], ["d0", "d1"]])


def test_a_step_without_a_directive_is_vllms_own() -> None:
    """Also behind one that failed before it was sampled from."""
    runner = Runner(["t0"], ["d0", "d1"])
    assert not runner.execute(runner.output()).speculates
    executed = runner.execute(SimpleNamespace())
    assert (executed.speculates, runner.sample().speculates) == (True, True)


def test_drafts_that_nobody_will_verify_are_let_go() -> None:
    runner = Runner(["t0"], ["d0", "d1"])
    runner.dsde_adapter._drafts.logits.append(torch.zeros(1, 8))
    runner.begin(longest=2)
    assert runner.dsde_adapter._drafts.logits
    runner.begin()
    assert not runner.dsde_adapter._drafts.logits


@pytest.mark.parametrize("groups", [[["t0", "d0", "d1"]], [["d0", "d1"], ["t0"]]])
def test_groups_that_the_target_needs_or_vllm_counts_stay(groups: list[list[str]]) -> None:
    assert in_step(Runner(*groups)) == (False, groups)


def test_a_connector_may_look_at_all_layers() -> None:
    runner = Runner(["t0"], ["d0", "d1"])
    runner.vllm_config.kv_transfer_config = SimpleNamespace()
    assert in_step(runner) == (False, [["t0"], ["d0", "d1"]])


def test_an_error_leaves_everything_as_it_was() -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("no memory")

    runner = Runner(["t0"], ["d0", "d1"])
    groups, output = runner.attn_groups, runner.output()
    with pytest.raises(RuntimeError, match="no memory"):
        running.execute(fail, runner, output)
    with pytest.raises(RuntimeError, match="no memory"):
        running.sample_tokens(fail, runner, None)
    assert runner.attn_groups is groups
    assert runner.speculative_config is not None


def test_a_step_that_nobody_times_is_not_reported() -> None:
    runner = Runner(["t0"])
    for is_timed in (True, False, True):
        runner.begin(is_timed=is_timed)
        found = running.sample_tokens(lambda *_: SimpleNamespace(), runner, None)
        assert (attached(found) is not None) is is_timed
    # Nor is one that nobody began, behind one that was.
    assert attached(running.sample_tokens(lambda *_: SimpleNamespace(), runner, None)) is None


def test_the_report_of_a_step_that_nobody_times_is_not_heard_of() -> None:
    heard: list[int] = []
    controller = SimpleNamespace(observe=lambda step, *_: heard.append(step), forget=lambda _: None)
    scheduler = SimpleNamespace(dsde_controller=controller, finished_req_ids=set())
    for step in (1, 0, 3):
        output = SimpleNamespace(scheduled_spec_decode_tokens={})
        attach(output, Directive(step))
        assert scheduling.update_from_output(lambda *_: "outputs", scheduler, output, SimpleNamespace()) == "outputs"
    assert heard == [1, 3]


def test_no_drafts_are_as_many_rows_of_nothing() -> None:
    adapter = Runner(["t0"]).dsde_adapter
    first = adapter._skip(torch.zeros(3, 1), spec_decode_metadata=None)
    assert first.shape == (3, 0)
    assert adapter._skip(torch.zeros(3, 1), spec_decode_metadata=None) is first
    assert adapter._skip(torch.zeros(2, 1), spec_decode_metadata=None).shape == (2, 0)
