"""What the plugin makes of settings, policies and a vLLM that looks right or wrong; without vLLM."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from dsde.core.errors import InvalidInput
from dsde.core.params import DEFAULT_POLICY
from dsde.integrations.vllm import graphs, hooks, room
from dsde.integrations.vllm.exporter import Collector
from dsde.integrations.vllm.graphs import LengthGraphs, plan_sizes
from dsde.integrations.vllm.meter import Meter
from dsde.integrations.vllm.plugin import asked_for
from dsde.integrations.vllm.scheduling import could_be_async
from dsde.integrations.vllm.settings import Settings, read_settings
from dsde.integrations.vllm.signals import divergences, looks
from dsde.integrations.vllm.support import make_supported


def test_a_draft_that_keeps_its_distribution_to_itself_is_refused_to_those_who_look_at_it() -> None:
    def config(policy: str) -> Any:
        speculative = SimpleNamespace(method="draft_model", use_local_argmax_reduction=True)
        return SimpleNamespace(additional_config={"dsde": {"policy": policy}}, speculative_config=speculative)

    with pytest.raises(InvalidInput, match="use_local_argmax_reduction"):
        asked_for(config("dsde"))
    for policy in ("auto", "goodput", "static:2"):
        assert asked_for(config(policy)) == Settings(policy=policy)


def test_settings() -> None:
    assert read_settings({}, {}) is None
    assert read_settings({"other": {}}, {"DSDE_POLICY": ""}) is None
    assert read_settings({"dsde": {}}, {}) == read_settings({"dsde": True}, {}) == Settings(policy=DEFAULT_POLICY)
    assert read_settings({"dsde": "dsde|gate"}, {}) == Settings(policy="dsde|gate")
    assert read_settings({}, {"DSDE_POLICY": "static:2"}) == Settings(policy="static:2")
    # What the command line says comes first.
    assert read_settings({"dsde": {"policy": "off"}}, {"DSDE_POLICY": "static:2"}) == Settings(policy="off")
    assert read_settings({"dsde": {"graphs": False}}, {"DSDE_POLICY": "x"}) == Settings(policy="x", graphs=False)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"dsde": {"polcy": "dsde"}}, "no setting 'polcy'; it has policy, graphs, trace"),
        ({"dsde": {"policy": 3}}, "dsde.policy must be a str, not 3"),
        ({"dsde": {"graphs": "yes"}}, "dsde.graphs must be a bool, not 'yes'"),
        ({"dsde": 4}, "must be settings as in"),
    ],
)
def test_wrong_settings(given: Any, words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        read_settings(given, {})


@pytest.mark.parametrize(
    ("policy", "method", "words"),
    [
        ("dsde", "medusa", "not with speculative method 'medusa'"),
        ("dsde", "ngram", "looks at the draft's distribution, and ngram has none"),
        ("svip", "draft_model", "ends drafts while they are made"),
        ("gammatune\\+", "draft_model", "ends drafts while they are made"),
        ("tapout", "draft_model", "ends drafts while they are made"),
        ("static:4\\|adaptiveverify", "draft_model", "would choose among it"),
        ("static:4\\|consultant", "draft_model", "lossless"),
    ],
)
def test_what_cannot_work_is_refused(policy: str, method: str, words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        make_supported(policy.replace("\\", ""), method)


def test_what_can() -> None:
    for method in ("draft_model", "eagle"):
        for policy in ("dsde", "auto", "goodput", "dsde|gate", "static:4", "ucbspec", "nightjar"):
            make_supported(policy, method)
    make_supported("goodput|meancap", "ngram")


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """One of vLLM's, in the making."""
    made = ModuleType("vllm_like")
    monkeypatch.setitem(sys.modules, "vllm_like", made)
    return made


def test_hooks_are_compared_and_wrapped(module: ModuleType) -> None:
    class Thing:
        def right(self, first: int, second: int, more: int = 0) -> int:
            return first + second + more

        def wrong(self, other: int) -> int:
            return other

    module.Thing = Thing  # type: ignore[attr-defined]
    right = hooks.Hook("vllm_like", "Thing", "right", ("first", "second"))
    assert hooks.find_changes([right]) == []
    assert hooks.find_changes([hooks.Hook("vllm_like", "Thing", "wrong", ("first",))]) == [
        "vllm_like.Thing.wrong takes (other) and not (first)"
    ]
    missing = [hooks.Hook("vllm_like", *names, ()) for names in (("Thing", "absent"), ("Absent", "right"))]
    missing.append(hooks.Hook("vllm_unlike", "Thing", "right", ()))
    assert [change.rsplit(" ", 3)[1:] for change in hooks.find_changes(missing)] == [["is", "not", "there"]] * 3

    calls = []

    def wrapper(original: Any, thing: Thing, *args: int, **kwargs: int) -> int:
        calls.append(args)
        return 10 * int(original(thing, *args, **kwargs))

    for _ in range(2):  # vLLM loads plugins more than once
        hooks.wrap(right, wrapper)
    assert Thing().right(1, 2, more=3) == 60
    assert calls == [(1, 2)]
    assert hooks.find_changes([right]) == []


def test_divergences_are_those_of_our_own_engine() -> None:
    from dsde.verification.divergence import kl_divergence

    generator = torch.Generator().manual_seed(0)
    target, draft = (4 * torch.randn(70, 50, generator=generator) for _ in range(2))
    draft[3, 5] = -torch.inf
    expected = kl_divergence(target, torch.arange(70), draft)
    torch.testing.assert_close(divergences(target, draft), expected)
    assert divergences(target[:0], draft[:0]).shape == (0,)


def test_looks() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.2], [1.0, 0.0, 0.0]]))
    found = looks(logits, torch.tensor([1, 0])).numpy()
    entropy = -(0.5 * np.log(0.5) + 0.3 * np.log(0.3) + 0.2 * np.log(0.2))
    np.testing.assert_allclose(found, [[entropy, 0.5, 0.2, 0.3], [0, 1, 1, 1]], atol=1e-6)


def test_sizes_of_graphs() -> None:
    assert plan_sizes(1, 256, 512)[-1] == 256
    assert plan_sizes(3, 256, 512)[-1] == 512 // 3
    assert plan_sizes(5, 3, 512) == [1, 2, 3]
    assert plan_sizes(9, 256, 8) == []


def test_a_batch_finds_the_smallest_graph() -> None:
    class Descriptor:
        def __init__(self, num_reqs: int) -> None:
            self.num_reqs = num_reqs

    known = LengthGraphs("FULL")
    known.add(2, [Descriptor(8), Descriptor(1), Descriptor(4)])
    assert known.find() is None
    for num_reqs, expected in ((1, 1), (2, 4), (4, 4), (5, 8)):
        known.batch = (2, num_reqs)
        assert known.find().num_reqs == expected
    for batch in ((2, 9), (3, 1)):
        known.batch = batch
        assert known.find() is None


def test_numbers_reach_another_process(tmp_path: Path) -> None:
    meter = Meter(tmp_path / "engine.bin", "dsde|gate")
    meter["num_draft_tokens"] += 7
    meter.count_plan(np.array([0, 2, 2]), None, 5)
    families = {family.name: family for family in Collector(tmp_path).collect()}
    [sample] = families["dsde_draft_tokens"].samples
    assert (sample.value, sample.labels["policy"]) == (7, "dsde|gate")
    assert {one.labels["length"]: one.value for one in families["dsde_lengths"].samples} == {"0": 1, "2": 2}
    assert families["dsde_catch_up_tokens"].samples[0].value == 5
    assert list(Collector(tmp_path / "nowhere").collect()) == []


@dataclass(frozen=True)
class BatchDescriptor:
    """As vLLM's."""

    num_tokens: int
    num_reqs: int | None = None
    uniform: bool = False
    has_lora: bool = False


class CUDAGraphMode(Enum):
    NONE = 0
    PIECEWISE = 1
    FULL = 2


class Runner:
    """What vLLM's does around graphs, in a few lines: to capture, it dispatches a dummy batch like any other."""

    def __init__(self) -> None:
        self.lora_config = None
        self.num_spec_tokens = 3
        self.speculative_config = SimpleNamespace(method="eagle")
        self.drafter = None
        self.uniform_decode_query_len = 4
        self.scheduler_config = SimpleNamespace(max_num_seqs=8)
        config = SimpleNamespace(max_cudagraph_capture_size=20)
        self.cudagraph_dispatcher = SimpleNamespace(compilation_config=config, uniform_decode_query_len=4)
        self.captured: list[tuple[int, int]] = []

    def dispatch(self, *_: Any, **__: Any) -> tuple[CUDAGraphMode, BatchDescriptor]:
        return CUDAGraphMode.PIECEWISE, BatchDescriptor(0)

    def determine(self, lengths: list[int], force: bool | None = None, **more: Any) -> Any:
        def original(runner: Runner, **kwargs: Any) -> Any:
            return graphs.dispatch(self.dispatch, runner.cudagraph_dispatcher, num_tokens=kwargs["num_tokens"], **more)

        return graphs.determine_batch(
            original,
            self,
            num_tokens=sum(lengths),
            num_reqs=len(lengths),
            num_scheduled_tokens_np=np.array(lengths),
            max_num_scheduled_tokens=max(lengths),
            force_uniform_decode=force,
        )

    def capture(self, descriptors: list[BatchDescriptor], mode: CUDAGraphMode) -> None:
        def original(runner: Runner, batch_descriptors: list[BatchDescriptor], mode: CUDAGraphMode) -> None:
            for descriptor in batch_descriptors:
                query_len = runner.uniform_decode_query_len
                assert descriptor.num_reqs is not None
                found, dispatched = runner.determine([query_len] * descriptor.num_reqs, force=True)
                if query_len < 4:
                    assert (found, dispatched) == (mode, descriptor)
                runner.captured.append((query_len, descriptor.num_reqs))

        graphs.capture(original, self, batch_descriptors=descriptors, cudagraph_runtime_mode=mode)


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> Runner:
    config = ModuleType("vllm.config")
    config.CUDAGraphMode = CUDAGraphMode  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.config", config)
    made = Runner()
    made.capture([BatchDescriptor(16, 4, True), BatchDescriptor(4, 1, True)], CUDAGraphMode.FULL)
    return made


def test_graphs_for_shorter_lengths(runner: Runner) -> None:
    """vLLM's own come first; then every shorter length, 0 included, in all sizes that fit."""
    assert runner.captured[:2] == [(4, 4), (4, 1)]
    assert sorted(runner.captured[2:]) == [
        *[(1, size) for size in (1, 2, 4, 8)],
        *[(2, size) for size in (1, 2, 4, 8)],
        *[(3, size) for size in (1, 2, 4, 6)],
    ]
    assert runner.uniform_decode_query_len == runner.cudagraph_dispatcher.uniform_decode_query_len == 4


def test_batches_of_one_length_run_whole(runner: Runner) -> None:
    assert runner.determine([1] * 5) == (CUDAGraphMode.FULL, BatchDescriptor(8, 8, True))
    assert runner.determine([3] * 2) == (CUDAGraphMode.FULL, BatchDescriptor(6, 2, True))
    mixed, longest, too_many = runner.determine([1, 3]), runner.determine([4, 4]), runner.determine([3] * 7)
    assert {found for found, _ in (mixed, longest, too_many)} == {CUDAGraphMode.PIECEWISE}
    # Where vLLM captures pieces, or forbids whole passes, it is obeyed.
    assert runner.determine([1] * 5, force=False)[0] is CUDAGraphMode.PIECEWISE
    assert runner.determine([1] * 5, valid_modes={CUDAGraphMode.NONE})[0] is CUDAGraphMode.PIECEWISE
    assert runner.determine([1] * 5, invalid_modes={CUDAGraphMode.FULL})[0] is CUDAGraphMode.PIECEWISE
    assert runner.determine([1] * 5, has_lora=True)[0] is CUDAGraphMode.PIECEWISE


def test_a_failed_capture_leaves_vllms_own(runner: Runner, caplog: pytest.LogCaptureFixture) -> None:
    def original(runner: Runner, batch_descriptors: list[BatchDescriptor], mode: CUDAGraphMode) -> None:
        if runner.uniform_decode_query_len == 2:
            raise RuntimeError("no memory")

    with caplog.at_level("WARNING"):
        graphs.capture(original, runner, [BatchDescriptor(16, 4, True)], CUDAGraphMode.FULL)
    assert "go without CUDA graphs of whole passes: no memory" in caplog.text
    assert runner.determine([1] * 5)[0] is CUDAGraphMode.PIECEWISE
    assert runner.uniform_decode_query_len == 4


@pytest.mark.parametrize(
    ("changes", "could"),
    [
        ({}, True),
        ({"method": "ngram"}, False),
        ({"disable_padded_drafter_batch": True}, False),
        ({"distributed_executor_backend": "ray"}, False),
        ({"device_type": "cpu"}, False),
    ],
)
def test_asynchronous_scheduling_is_recommended_only_where_vllm_allows_it(changes: dict[str, Any], could: bool) -> None:
    all_ = {"method": "draft_model", "device_type": "cuda", "distributed_executor_backend": None} | changes
    part = SimpleNamespace(**all_)
    config = SimpleNamespace(speculative_config=part, device_config=part, parallel_config=part)
    assert could_be_async(config) is could


def test_optional_hooks_are_wrapped_together_or_not_at_all(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    wrapped: list[str] = []
    monkeypatch.setattr(hooks, "wrap", lambda hook, _: wrapped.append(hook.name))
    monkeypatch.setattr(hooks, "find_changes", lambda wanted: ["it is gone"] if hooks.DISPATCH in wanted else [])
    with caplog.at_level("WARNING"):
        hooks.wrap_if_known({hooks.CAPTURE: print, hooks.DISPATCH: print}, lost="no graphs")
    assert wrapped == []
    assert "dsde: no graphs: it is gone" in caplog.text
    hooks.wrap_if_known({hooks.CAPTURE: print}, lost="no graphs")
    assert wrapped == [hooks.CAPTURE.name]


def test_loops_get_room_one_by_one(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """An engine starts whatever vLLM's loops are called: one that is inherited, gone, or not imported yet."""

    class Core:
        def run_busy_loop(self) -> str:
            return "ran"

    class Inheriting(Core):
        pass

    for made in (Core, Inheriting):
        made.__module__ = room.CORE
    module = ModuleType(room.CORE)
    module.EngineCoreProc = Core  # type: ignore[attr-defined]
    module.DPEngineCoreProc = Inheriting  # type: ignore[attr-defined]
    Core.__qualname__ = "EngineCoreProc"
    monkeypatch.setitem(sys.modules, room.CORE, module)
    monkeypatch.setitem(sys.modules, room.OFFLINE_LOOP.module, ModuleType("half imported"))
    room._say.cache_clear()
    for _ in range(2):
        room.install()
    assert Core.run_busy_loop.is_dsde  # type: ignore[attr-defined]
    assert "run_busy_loop" not in vars(Inheriting)
    assert Inheriting().run_busy_loop() == "ran"
    assert [record.getMessage() for record in caplog.records] == [
        "dsde: vllm.entrypoints.llm.LLM._run_engine is not there; steps may take longer than they have to"
    ]


def test_what_a_class_inherits_is_not_its_own_to_wrap(monkeypatch: pytest.MonkeyPatch) -> None:
    class Parent:
        def run(self) -> None:
            """Of the parent."""

    class Child(Parent):
        pass

    module = ModuleType("vllm_like")
    module.Child = Child  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm_like", module)
    assert hooks.find_changes([hooks.Hook("vllm_like", "Child", "run", ())]) == ["vllm_like.Child.run is not there"]
