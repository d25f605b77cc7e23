"""What the plugin leaves out of steps in which nobody drafts, with parts like vLLM's; without vLLM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dsde.integrations.vllm import omission, running
from dsde.integrations.vllm.messages import CatchUp, Directive, attach
from dsde.integrations.vllm.settings import Settings


class Runner:
    """vLLM's, as far as it prepares a step: a target with two groups of attention layers, a draft with one."""

    def __init__(self, *groups: list[str], method: str = "draft_model") -> None:
        self.speculative_config: Any = SimpleNamespace(method=method)
        self.vllm_config = SimpleNamespace(kv_transfer_config=None)
        self.model_config = SimpleNamespace(is_hybrid=False)
        self.device = torch.device("cpu")
        self.attn_groups = [[SimpleNamespace(layer_names=names) for names in groups]]
        self.drafter = SimpleNamespace(draft_attn_groups=[SimpleNamespace(layer_names=["d0", "d1"])])
        self.dsde_adapter = running.RunnerAdapter(self, Settings(policy="off"))

    def begin(self, longest: int = 0, catch_up: bool = False, drafts: Any = None, is_timed: bool = True) -> Any:
        pieces = [CatchUp("r", 0, [1, 2])] if catch_up else []
        output = SimpleNamespace(num_spec_tokens_to_schedule=longest, scheduled_spec_decode_tokens=drafts or {})
        attach(output, Directive(1, {"r": longest}, longest, pieces, is_timed))
        self.dsde_adapter.begin(output)
        return output

    def built(self) -> list[list[str]]:
        """Groups for which attention metadata is made."""
        groups: list[list[str]] = []

        def original(runner: Runner) -> None:
            groups.extend(group.layer_names for part in runner.attn_groups for group in part)

        everything = self.attn_groups
        omission.build_attention(original, self)
        assert self.attn_groups is everything
        return groups

    def speculates(self, output: Any) -> bool:
        """Whether the step is prepared as one of an engine that does."""
        found: list[bool] = []

        def original(runner: Runner, scheduler_output: Any) -> None:
            found.append(runner.speculative_config is not None)

        omission.prepare_inputs(original, self, output)
        assert self.speculative_config is not None
        return found[0]


def test_nothing_is_prepared_for_a_draft_that_is_left_out() -> None:
    runner = Runner(["t0", "t1"], ["t2"], ["d0", "d1"])
    everything = [["t0", "t1"], ["t2"], ["d0", "d1"]]
    assert runner.built() == everything
    for output in (runner.begin(longest=2), runner.begin(catch_up=True)):
        assert runner.built() == everything
        assert runner.speculates(output)
    output = runner.begin()
    assert runner.built() == everything[:2]
    assert not runner.speculates(output)
    runner.dsde_adapter.end()
    assert runner.built() == everything


def test_drafts_of_the_step_before_are_verified_as_ever() -> None:
    runner = Runner(["t0"], ["d0", "d1"])
    output = runner.begin(drafts={"r": [-1, -1]})
    assert runner.built() == [["t0"]]
    assert runner.speculates(output)


def test_a_recurrent_target_is_prepared_as_ever() -> None:
    runner = Runner(["t0"], ["d0", "d1"])
    runner.model_config.is_hybrid = True
    assert runner.speculates(runner.begin())


def test_a_draft_that_must_run_in_every_step_is_prepared_as_ever() -> None:
    runner = Runner(["t0"], ["d0", "d1"], method="eagle")
    output = runner.begin()
    assert runner.built() == [["t0"], ["d0", "d1"]]
    assert runner.speculates(output)


@pytest.mark.parametrize("groups", [[["t0", "d0", "d1"]], [["d0", "d1"], ["t0"]]])
def test_groups_that_the_target_needs_or_vllm_counts_stay(groups: list[list[str]]) -> None:
    runner = Runner(*groups)
    runner.begin()
    assert runner.built() == groups


def test_a_connector_may_look_at_all_layers() -> None:
    runner = Runner(["t0"], ["d0", "d1"])
    runner.vllm_config.kv_transfer_config = SimpleNamespace()
    runner.begin()
    assert runner.built() == [["t0"], ["d0", "d1"]]


def test_an_error_leaves_everything_as_it_was() -> None:
    def original(*_: Any) -> None:
        raise RuntimeError("no memory")

    runner = Runner(["t0"], ["d0", "d1"])
    output, groups = runner.begin(), runner.attn_groups
    for leave_out, given in ((omission.build_attention, ()), (omission.prepare_inputs, (output,))):
        with pytest.raises(RuntimeError, match="no memory"):
            leave_out(original, runner, *given)
    assert runner.attn_groups is groups
    assert runner.speculative_config is not None


def test_a_step_that_nobody_times_is_not_reported() -> None:
    runner = Runner(["t0"])
    for is_timed in (True, False, True):
        runner.begin(is_timed=is_timed)
        runner.dsde_adapter.mark()
        assert (runner.dsde_adapter.end() is not None) is is_timed


def test_no_drafts_are_as_many_rows_of_nothing() -> None:
    adapter = Runner(["t0"]).dsde_adapter
    first = adapter._skip(torch.zeros(3, 1), spec_decode_metadata=None)
    assert first.shape == (3, 0)
    assert adapter._skip(torch.zeros(3, 1), spec_decode_metadata=None) is first
    assert adapter._skip(torch.zeros(2, 1), spec_decode_metadata=None).shape == (2, 0)
