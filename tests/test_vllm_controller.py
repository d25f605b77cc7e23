"""The plugin's decisions, against requests and scheduler outputs as vLLM's scheduler has them; without vLLM."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dsde.core.stops import StopByWorth
from dsde.integrations.vllm.controller import Controller, Decision, Limits
from dsde.integrations.vllm.messages import Directive, Feedback
from dsde.integrations.vllm.rest import LEAST_REST, LONGEST_REST, Rest
from dsde.integrations.vllm.support import pairs, takes_turns
from dsde.policies import BatchView, Need, Outcome, Plan, Policy, make_policy


@dataclass
class Request:
    """Of vLLM's, what the plugin looks at."""

    name: str
    prompt: list[int]
    max_tokens: int = 50
    temperature: float = 0.0
    output: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    is_prefill_chunk: bool = False

    @property
    def all_token_ids(self) -> list[int]:
        return self.prompt + self.output

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.output)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt)

    @property
    def sampling_params(self) -> Any:
        return SimpleNamespace(temperature=self.temperature)


class Clock:
    """Stands still while the controller works."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Scheduler:
    """vLLM's without asynchronous scheduling, in a few lines: one step at a time, drafts accepted as told."""

    def __init__(self, controller: Controller, num: int, prompt: int = 6) -> None:
        self.controller = controller
        self.requests = {f"r{i}": Request(f"r{i}", list(range(prompt + i))) for i in range(num)}
        self.lengths: dict[str, int] = {}
        self.finished: set[str] = set()
        self.pass_s = 0.002
        self.gap_s = 0.0
        """that the device waits before a step"""

    def step(self, accepted: int = 0, signals: bool = False) -> Directive:
        """Schedule, run and report one step; of every draft so many tokens stand."""
        scheduled, drafts, new = {}, {}, []
        for name, request in self.requests.items():
            if request.num_computed_tokens == 0:
                scheduled[name] = len(request.prompt)
                new.append(SimpleNamespace(req_id=name, num_computed_tokens=0))
            else:
                scheduled[name] = 1 + self.lengths.get(name, 0)
                if self.lengths.get(name):
                    drafts[name] = [-1] * self.lengths[name]
            request.num_computed_tokens += scheduled[name]
        output = SimpleNamespace(
            num_scheduled_tokens=scheduled,
            scheduled_spec_decode_tokens=drafts,
            total_num_scheduled_tokens=sum(scheduled.values()),
            scheduled_new_reqs=new,
            finished_req_ids=self.finished,
        )
        self.finished = set()
        directive = self.controller.decide(output, self.requests, 0)
        sampled = {}
        for name, request in self.requests.items():
            stood = min(accepted, len(drafts.get(name, ())))
            sampled[name] = stood + 1
            request.num_computed_tokens -= len(drafts.get(name, ())) - stood
            request.output += [9] * (stood + 1)
        draft_s = self.pass_s * max(directive.lengths.values(), default=0)
        feedback = Feedback(verify_s=0.01, draft_s=draft_s, step_s=0.01 + draft_s + self.gap_s)
        if signals:
            feedback.request_ids = list(reversed(self.requests))
            feedback.num_drafted = [len(drafts.get(name, ())) for name in feedback.request_ids]
            rows = [[int(name[1:]), 1, 2, 3, 4] for name in feedback.request_ids for _ in drafts.get(name, ())]
            feedback.signals = np.array(rows, np.float64).reshape(-1, 5)
        if isinstance(self.controller._clock, Clock):
            self.controller._clock.now += feedback.verify_s + feedback.draft_s
        self.controller.observe(directive.step, sampled, feedback if directive.is_timed else None)
        self.lengths = directive.lengths
        return directive

    def end(self, name: str) -> None:
        del self.requests[name]
        self.finished.add(name)


class Recorded(Policy):
    """Lengths by script, and everything it was told."""

    def __init__(self, lengths: list[int], needs: Need = Need.NOTHING) -> None:
        self.script = lengths
        self.needs = needs
        self.outcomes: list[Outcome] = []
        self.forgotten: list[int] = []

    def plan(self, batch: BatchView) -> Plan:
        return Plan.wanting(self.script.pop(0) if self.script else 0, batch)

    def observe(self, outcome: Outcome) -> None:
        self.outcomes += [outcome] * outcome.num_steps

    def forget(self, slots: np.ndarray[Any, Any]) -> None:
        self.forgotten += slots.tolist()


def make(policy: Policy, **changes: Any) -> Controller:
    limits = {"max_length": 8, "max_model_len": 200, "num_in_flight": 1, "exact_rooms": True, "can_skip": True}
    return Controller(policy, Limits(**limits | changes), clock=Clock())


def test_an_outcome_belongs_to_its_plan() -> None:
    """A plan is obeyed at the end of its step and verified by the next: the policy hears of both."""
    policy = Recorded([3, 2, 1, 4])
    scheduler = Scheduler(make(policy), 2)
    assert scheduler.step().lengths == {"r0": 3, "r1": 3}
    scheduler.step(accepted=2)
    scheduler.step(accepted=2)
    first, second = policy.outcomes
    assert first.drafted.tolist() == [3, 3]
    assert first.accepted.tolist() == [2, 2]
    assert (first.draft_s, first.verify_s) == (0.006, 0.01)
    assert (first.num_decoding, first.num_drafted, first.num_draft_passes, first.num_prompt_tokens) == (2, 6, 3, 0)
    assert second.drafted.tolist() == [2, 2]


def test_signals_are_put_in_the_order_of_the_plan() -> None:
    policy = Recorded([2, 2, 2], needs=Need.KLD | Need.DRAFT_SIGNALS)
    scheduler = Scheduler(make(policy), 3)
    for _ in range(3):
        scheduler.step(accepted=1, signals=True)
    outcome = policy.outcomes[0]
    assert outcome.klds.tolist() == [0, 0, 1, 1, 2, 2]
    assert outcome.draft_signals.tolist() == [[1, 2, 3]] * 6


def test_rooms_end_with_the_request() -> None:
    policy = Recorded([8] * 9)
    scheduler = Scheduler(make(policy), 1)
    scheduler.requests["r0"].max_tokens = 6
    scheduler.step()
    # One token comes of this step, one of the next beside the drafts.
    assert scheduler.step().lengths == {"r0": 3}
    wide = Scheduler(make(Recorded([8] * 9), exact_rooms=False), 1)
    wide.requests["r0"].max_tokens = 6
    wide.step()
    assert wide.step().lengths == {"r0": 8}


def test_those_who_end_leave_nothing() -> None:
    policy = Recorded([0, 0, 0, 2, 2, 2])
    controller = make(policy)
    scheduler = Scheduler(controller, 3)
    scheduler.step()
    scheduler.end("r1")
    scheduler.step()
    assert policy.forgotten == [1]
    assert len(controller.slots) == len(controller.backlog) == 2
    scheduler.requests["r3"] = Request("r3", [1, 2, 3])
    scheduler.step()
    assert controller.slots.of("r3") == 1
    for name in list(scheduler.requests):
        scheduler.end(name)
    scheduler.step()
    assert len(controller.slots) == len(controller.backlog) == 0


def test_a_pause_is_caught_up() -> None:
    policy = Recorded([2, 0, 0, 0, 2, 2])
    scheduler = Scheduler(make(policy), 1)
    for _ in range(4):
        assert not scheduler.step(accepted=2).catch_up
    request = scheduler.requests["r0"]
    num_computed = request.num_computed_tokens
    tokens = request.all_token_ids
    directive = scheduler.step()
    [piece] = directive.catch_up
    # What the step itself reads is read by the draft with it.
    assert piece.first + len(piece.tokens) == num_computed
    assert piece.tokens == tokens[piece.first : num_computed]
    # Two of them the draft had read as its own drafts; the step that made the pause began behind them.
    assert piece.first <= 7
    assert directive.lengths == {"r0": 2}
    assert not scheduler.step(accepted=1).catch_up


def test_a_long_backlog_is_spread_over_steps() -> None:
    controller = make(Recorded([0] * 30 + [2] * 9))
    controller.backlog.budget = 20
    scheduler = Scheduler(controller, 2, prompt=4)
    for _ in range(30):
        scheduler.step()
    lengths, num_read = [], 0
    for _ in range(6):
        directive = scheduler.step()
        assert directive.num_catch_up_tokens <= 20
        num_read += directive.num_catch_up_tokens
        lengths.append(directive.lengths)
    assert lengths[0] == {"r0": 0, "r1": 0}
    assert lengths[-1] == {"r0": 2, "r1": 2}
    assert {"r0": 2, "r1": 0} in lengths
    assert num_read >= 34 + 35


def test_who_pays_for_trying_is_asked_one_thing_at_a_time() -> None:
    """While an outcome is awaited steps repeat what was settled: a look at the alternative lasts one step."""
    policy = make_policy("goodput")
    assert takes_turns(policy)
    assert not pairs(policy)
    assert not takes_turns(make_policy("dsde"))
    controller = make(policy)
    asked: list[int] = []
    script = iter([0, 0, 3, 0, 0, 0, 4, 4, 4])
    policy.plan = lambda batch: asked.append(1) or Plan.wanting(next(script), batch)  # type: ignore[method-assign]
    scheduler = Scheduler(controller, 2)
    drafted = [max(scheduler.step(accepted=1).lengths.values()) for _ in range(18)]
    assert drafted[:6] == [0, 0, 0, 0, 3, 0]
    assert drafted[6:12] == [0] * 6
    # The second plan of the kind settles it.
    assert drafted[12:18] == [4, 0, 4, 4, 4, 4]
    assert len(asked) == 9


def test_auto_without_its_rule_obeys_its_prediction() -> None:
    controller = make(make_policy("auto"), max_length=6, exact_rooms=False)
    scheduler = Scheduler(controller, 1)
    for _ in range(60):
        scheduler.step(accepted=6)
        latest = controller._latest
        assert latest is not None
        if latest.plan is not None and latest.plan.stop is not None:
            assert latest.lengths[0] <= latest.plan.predicted[0]
    assert max(controller.latest_lengths.values()) >= 2


def test_one_length_is_favoured_as_far_as_there_are_graphs() -> None:
    policy = Recorded([])
    views: list[BatchView] = []
    plan = policy.plan
    policy.plan = lambda batch: views.append(batch) or plan(batch)  # type: ignore[func-returns-value, method-assign]
    for num, num_graph_tokens in ((3, 0), (3, 6), (4, 6)):
        Scheduler(make(policy, num_graph_tokens=num_graph_tokens), num).step()
    assert [view.favours_one_length for view in views] == [False, True, False]


def test_auto_drafts_again_when_drafts_are_no_longer_dear() -> None:
    """Somebody else's work is over: while off nothing but probes tells."""
    scheduler = Scheduler(make(make_policy("auto"), exact_rooms=False, max_model_len=4096), 8)
    for request in scheduler.requests.values():
        request.max_tokens = 4000

    def lengths(num: int) -> list[int]:
        return [max(scheduler.step(accepted=2).lengths.values()) for _ in range(num)]

    assert min(lengths(60)[-20:]) >= 2
    scheduler.pass_s = 0.02
    assert sum(length > 0 for length in lengths(120)[-60:]) <= 3
    scheduler.pass_s = 0.002
    assert min(lengths(700)[-100:]) >= 2


@pytest.mark.parametrize(
    "policy", ["static:3", "dsde", "auto", "goodput", "gammatune", "ucbspec", "nightjar", "dsde|gate"]
)
def test_any_policy_goes_on(policy: str) -> None:
    controller = make(make_policy(policy))
    scheduler = Scheduler(controller, 5)
    for number in range(60):
        scheduler.step(accepted=number % 3, signals=True)
        if number == 30:
            scheduler.end("r2")
    controller.forget(list(scheduler.requests))  # steps of a rest are counted when it ends
    assert controller.meter["num_steps"] == 60
    assert sum(controller.meter.lengths) == 5 * 31 + 4 * 29
    assert len(controller._steps) == 0


def test_a_name_that_is_used_again_is_another_request() -> None:
    policy = Recorded([2] * 20)
    scheduler = Scheduler(make(policy), 1)
    for _ in range(4):
        scheduler.step(accepted=1)
    scheduler.controller.forget(["r0"])
    scheduler.requests["r0"] = Request("r0", list(range(6)))
    scheduler.lengths = {}
    num_before = len(policy.outcomes)
    for _ in range(4):
        scheduler.step(accepted=1)
    assert policy.forgotten == [0]
    assert "r0" in scheduler.controller.slots
    assert len(policy.outcomes) >= num_before + 3


@pytest.mark.parametrize("is_idle", [False, True])
def test_what_the_device_waits_for_is_shared_by_verification_and_draft(is_idle: bool) -> None:
    """vLLM's own work between steps; but not the time in which nobody asked for anything. What is launched for a draft
    keeps the host until the next step, which waits for that: neither it nor another one without drafts is dearer."""
    policy = Recorded([0, 0, 0, 3, 0, 0, 0])
    controller = make(policy)
    scheduler = Scheduler(controller, 1)
    for gap_s in (0.001, 0.001, 0.001, 0.001, 0.004, 5.0 if is_idle else 0.002, 0.001):
        if is_idle and gap_s == 5.0:
            controller._clock.now += gap_s  # type: ignore[attr-defined]
        scheduler.gap_s = gap_s
        scheduler.step(3)
    plain, drafting, verifying, behind, last = policy.outcomes[:2], *policy.outcomes[2:]
    assert [one.verify_s for one in plain] == pytest.approx([0.011] * 2)
    assert (drafting.verify_s, drafting.draft_s) == pytest.approx((0.011, 0.0))
    assert (verifying.verify_s, verifying.draft_s) == pytest.approx((0.011, 0.009))
    assert (behind.verify_s, behind.draft_s) == pytest.approx((0.011 if is_idle else 0.012, 0.0))
    assert (last.verify_s, last.draft_s) == pytest.approx((0.011, 0.0))


def test_what_a_step_took_behind_one_that_nobody_timed_is_what_the_device_did() -> None:
    policy = Recorded([0, 0, 0])
    controller = make(policy)
    scheduler = Scheduler(controller, 1)
    scheduler.gap_s = 0.003
    for _ in range(2):
        scheduler.step()
    scheduler.gap_s = -0.01  # so that there is no such time
    scheduler.step()
    assert [one.verify_s for one in policy.outcomes] == pytest.approx([0.013] * 2)


@pytest.mark.parametrize(("gap_s", "draft_s"), [(0.004, 0.006), (0.002, 0.004), (0.001, 0.004)])
def test_steps_of_a_rest_tell_what_is_usual_between_two(gap_s: float, draft_s: float) -> None:
    """Of what the device waits behind a draft only the rest of it is the draft's, and never less than nothing."""
    policy = Resting(LEAST_REST)
    scheduler = Scheduler(make(policy), 1)
    scheduler.step()
    scheduler.gap_s = 0.002
    for _ in range(LEAST_REST + 1):
        directive = scheduler.step()
    assert directive.longest == 2
    scheduler.gap_s = gap_s
    scheduler.step()
    scheduler.step()
    assert policy.outcomes[-1].draft_s == pytest.approx(draft_s)
    assert policy.outcomes[-1].verify_s == pytest.approx(0.01 + min(gap_s, 0.002))


class Resting(Recorded):
    """Nobody drafts for so many steps, then everybody in one."""

    def __init__(self, num_resting: int) -> None:
        super().__init__([])
        self.num_resting = num_resting
        self.batches: list[BatchView] = []
        self.events: list[str] = []

    def plan(self, batch: BatchView) -> Plan:
        self.batches.append(batch)
        self.events.append("plan")
        is_on = len(self.batches) % 2 == 0
        plan = Plan.wanting(2 * is_on, batch)
        plan.num_resting = 0 if is_on else self.num_resting
        return plan

    def observe(self, outcome: Outcome) -> None:
        super().observe(outcome)
        self.events += ["observe"] * outcome.num_steps

    def forget(self, slots: np.ndarray[Any, Any]) -> None:
        super().forget(slots)
        self.events.append("forget")


def test_a_rest_is_not_asked_about_and_told_as_a_whole() -> None:
    policy = Resting(40)
    controller = make(policy)
    scheduler = Scheduler(controller, 3)
    directives = [scheduler.step() for _ in range(41)]
    assert len(policy.batches) == 1
    assert not policy.outcomes, "the first step verifies nothing, and of the others nothing is told yet"
    assert all(directive.lengths == {"r0": 0, "r1": 0, "r2": 0} for directive in directives)
    assert [place for place, directive in enumerate(directives) if directive.is_timed] == [0, 1, 2, 3, 4, 32, 33]
    assert len({id(directive) for directive in directives if not directive.is_timed}) == 1, "nothing is made for them"
    # Now the policy is asked, and before that it is told.
    directive = scheduler.step()
    assert policy.events == ["plan", *["observe"] * 40, "plan", "observe"]
    assert directive.lengths == {"r0": 2, "r1": 2, "r2": 2}
    assert [piece.first + len(piece.tokens) for piece in directive.catch_up] == [46, 47, 48]
    for outcome in policy.outcomes[:40]:
        assert outcome.slots.tolist() == [0, 1, 2]
        assert outcome.drafted.tolist() == outcome.accepted.tolist() == [0, 0, 0]
        assert (outcome.num_decoding, outcome.num_sequences, outcome.num_plain_tokens) == (3, 3, 3)
        assert outcome.verify_s == pytest.approx(0.01)
    meter = controller.meter
    assert [meter[name] for name in ("num_steps", "num_off_steps", "num_plans")] == [42, 41, 2]
    assert meter.lengths[:3] == [123, 0, 3]
    assert meter["verify_s"] == pytest.approx(0.41)


def test_no_rest_is_longer_than_any() -> None:
    policy = make_policy("off")
    scheduler = Scheduler(make(policy), 1)
    asked: list[int] = []
    plan = policy.plan
    policy.plan = lambda batch: asked.append(scheduler.controller._number) or plan(batch)  # type: ignore[method-assign]
    for _ in range(3 * (LONGEST_REST + 1)):
        scheduler.step()
    assert asked == [1, LONGEST_REST + 2, 2 * LONGEST_REST + 3]


def test_who_comes_ends_a_rest() -> None:
    policy = Resting(20)
    scheduler = Scheduler(make(policy), 2)
    for _ in range(6):
        scheduler.step()
    scheduler.requests["r2"] = Request("r2", [1, 2, 3])
    assert scheduler.step().lengths == {"r0": 2, "r1": 2, "r2": 2}
    # Its five steps are told first; then what came of the one that ended it.
    assert policy.events == ["plan", *["observe"] * 5, "plan", "observe"]


def test_who_goes_ends_a_rest() -> None:
    policy = Resting(20)
    scheduler = Scheduler(make(policy), 3)
    for _ in range(6):
        scheduler.step()
    scheduler.end("r1")
    assert scheduler.step().lengths == {"r0": 2, "r2": 2}
    # It is told before the slot is another's.
    assert policy.events == ["plan", *["observe"] * 5, "forget", "plan", "observe"]
    assert policy.outcomes[4].slots.tolist() == [0, 1, 2]
    assert policy.batches[-1].slots.tolist() == policy.outcomes[5].slots.tolist() == [0, 2]


def run_asynchronously(controller: Controller, num_steps: int) -> list[int]:
    """Steps of one request, of 10 ms, each scheduled before the one before it is reported; how many outcomes
    the policy had been told when each was decided on."""
    request = Request("r0", list(range(8)), max_tokens=1000)
    lengths, under_way, num_told = 0, [], []
    for number in range(num_steps):
        num = 1 + lengths if number else 8
        request.num_computed_tokens += num
        output = SimpleNamespace(
            num_scheduled_tokens={"r0": num},
            scheduled_spec_decode_tokens={"r0": [-1] * lengths} if lengths else {},
            total_num_scheduled_tokens=num,
            scheduled_new_reqs=[],
            finished_req_ids=set(),
        )
        under_way.append(controller.decide(output, {"r0": request}, 0))
        num_told.append(len(getattr(controller.policy, "outcomes", ())))
        lengths = under_way[-1].longest
        if len(under_way) > 1:
            controller._clock.now += 0.01  # type: ignore[attr-defined]
            directive = under_way.pop(0)
            feedback = Feedback(0.009, 0.0, 0.01) if directive.is_timed else None
            controller.observe(directive.step, {"r0": 1}, feedback)
            request.output.append(9)
    return num_told


def test_steps_under_way_belong_to_their_rest() -> None:
    """With asynchronous scheduling the newest of them is not reported when the policy is asked again."""
    num = LEAST_REST
    policy = Resting(num)
    controller = make(policy, num_in_flight=2)
    assert run_asynchronously(controller, num + 3) == [0] * (num + 1) + [num, num]
    assert [outcome.verify_s for outcome in policy.outcomes[:num]] == pytest.approx([0.01] * num)
    # What is reported of them later is not told again.
    assert len(policy.outcomes) == num + 1
    assert len(controller._steps) == 1


@pytest.mark.parametrize(("num_resting", "num_counted"), [(0, 98), (2, 98), (40, 99)])
def test_what_steps_of_a_rest_took_is_counted(num_resting: int, num_counted: int) -> None:
    """With asynchronous scheduling the last ones end after their rest, and of a short one that is half of it."""
    policy = make_policy("goodput")

    def plan(batch: BatchView) -> Plan:
        plan = Plan.wanting(0, batch)
        plan.num_resting = num_resting
        return plan

    policy.plan = plan  # type: ignore[method-assign]
    controller = make(policy, num_in_flight=2)
    run_asynchronously(controller, 100)
    controller.forget(["r0"])
    assert controller.meter["num_steps"] == 100
    # The first verified nothing, and the last is still under way: it counts if it belongs to a rest.
    assert controller.meter["verify_s"] == pytest.approx(0.01 * num_counted)


@pytest.mark.parametrize(("num_resting", "expected"), [(0, [3, 3, 0, 3, 0, 0]), (5, [3, 3, 0, 0, 0, 0])])
def test_a_rest_that_is_announced_is_no_look_at_the_alternative(num_resting: int, expected: list[int]) -> None:
    """Who takes turns and has drafted goes on in the step after one without; but not if it says that it rests."""
    policy = make_policy("goodput")
    script = iter([3, 0, 0])

    def plan(batch: BatchView) -> Plan:
        plan = Plan.wanting(next(script), batch)
        plan.num_resting = 0 if plan.lengths.any() else num_resting
        return plan

    policy.plan = plan  # type: ignore[method-assign]
    scheduler = Scheduler(make(policy), 1)
    assert [max(scheduler.step().lengths.values()) for _ in expected] == expected


def test_a_rest_leaves_nothing_untold() -> None:
    """What `auto` thinks that the draft has missed is what it has to catch up on, when there is time for a probe."""
    policy = make_policy("auto")
    controller = make(policy, exact_rooms=False)
    scheduler = Scheduler(controller, 2)
    missed = []
    for _ in range(1000):
        directive = scheduler.step()
        if directive.catch_up:
            missed.append((policy.cost_models[0].num_behind(np.arange(2)), directive.num_catch_up_tokens))
    assert controller.meter["num_off_steps"] > 850
    assert len(missed) > 3
    for known, found in missed[1:]:
        assert known == pytest.approx(found, rel=0.1, abs=6)


def test_a_trace_has_every_step() -> None:
    policy = Resting(20)
    controller = make(policy)
    written: list[int] = []
    controller._trace = SimpleNamespace(write=lambda number, *_: written.append(number))  # type: ignore[assignment]
    scheduler = Scheduler(controller, 1)
    for _ in range(5):
        scheduler.step()
    assert written == [2, 3, 4, 5]


@pytest.mark.parametrize(("num_reported", "verify_s"), [(0, 0.0), (1, 0.0), (2, 0.02)])
def test_too_few_steps_of_a_rest_measure_nothing(num_reported: int, verify_s: float) -> None:
    """The others may still be under way when it ends."""
    batch = BatchView(np.arange(2), np.ones(2, np.int64), np.zeros(2), 2)
    rest = Rest(batch, {"a": 0, "b": 0}, 9, is_one=True, num_untold=1)
    for _ in range(5):
        rest.take_step(0.0)
    rest.seconds.extend([0.02] * num_reported)
    (outcome,) = rest.outcomes()
    assert (outcome.num_steps, outcome.verify_s) == (6, verify_s)


class Looking(Recorded):
    """Whatever it drafts is only to see what comes of it."""

    def plan(self, batch: BatchView) -> Plan:
        plan = super().plan(batch)
        plan.predicted = plan.predicted * 0
        return plan


def test_two_looks_in_a_row_settle_nothing() -> None:
    """Steps behind each go on without drafts: nobody would pay for them."""
    controller = make(Looking([1, 1, 1]))
    controller._takes_turns = True
    scheduler = Scheduler(controller, 2)
    lengths = [max(scheduler.step().lengths.values()) for _ in range(5)]
    assert lengths == [1, 1, 0, 1, 1]


def test_what_the_draft_has_missed_is_known_to_the_token() -> None:
    """Prompts that nobody drafted behind included. Those that the step itself reads are nothing more where somebody
    drafts anyway."""
    policy = Recorded([0, 0, 0, 2, 0])
    views: list[BatchView] = []
    plan = policy.plan
    policy.plan = lambda batch: views.append(batch) or plan(batch)  # type: ignore[func-returns-value, method-assign]
    scheduler = Scheduler(make(policy), 2, prompt=6)
    for _ in range(5):
        scheduler.step()
    missed = [view.num_missed.tolist() for view in views if view.num_missed is not None]
    assert missed == [[5, 6], [6, 7], [7, 8], [8, 9], [0, 0]]
    scheduler = Scheduler(make(policy := Recorded([2, 2])), 2, prompt=6)
    scheduler.step()
    scheduler.requests["new"] = Request("new", list(range(9)))
    views.clear()
    plan = policy.plan
    policy.plan = lambda batch: views.append(batch) or plan(batch)  # type: ignore[func-returns-value, method-assign]
    scheduler.step()
    assert views[0].num_missed is not None
    assert views[0].num_missed.tolist() == [0, 0, 0]


def test_a_plan_whose_requests_are_all_gone_is_not_waited_for() -> None:
    """Or those who come next would do as the last ones did at their end."""
    policy = Recorded([0, 3, 3])
    controller = make(policy, num_in_flight=2)
    controller._takes_turns = True
    first = Scheduler(controller, 1)
    assert first.step().lengths == {"r0": 0}
    first.end("r0")
    second = Scheduler(controller, 2)
    second.finished = first.finished
    second.requests = {f"s{name}": request for name, request in second.requests.items()}
    assert second.step().lengths == {"sr0": 3, "sr1": 3}


def test_who_says_where_to_stop_has_decided_to_draft() -> None:
    """The first such plan counts for steps in which nobody is asked, too."""

    class Deciding(Recorded):
        def plan(self, batch: BatchView) -> Plan:
            plan = super().plan(batch)
            if plan.lengths.any():
                plan.stop = StopByWorth(np.zeros(3), np.zeros(2), np.zeros(2), 0.0, 0.0, 0.0)
            return plan

    for obeys in (False, True):
        controller = make(Deciding([0, 0, 3, 3, 3]))
        controller._takes_turns, controller._obeys_prediction = True, obeys
        scheduler = Scheduler(controller, 2)
        lengths = [max(scheduler.step().lengths.values()) for _ in range(7)]
        assert lengths[:4] == [0] * 4
        assert lengths[4:] == ([3, 3, 3] if obeys else [3, 0, 3])


def test_a_rest_that_is_told_as_one_is_long_enough_to_be_measured() -> None:
    """Though the newest of its steps are still under way when it ends, here one of two."""
    policy = Recorded([0] * 9)
    controller = make(policy, num_in_flight=2)
    controller._takes_turns = controller._pairs = True
    scheduler = Scheduler(controller, 1)
    observe, held = controller.observe, []
    controller.observe = lambda *report: held.append(report)  # type: ignore[method-assign, assignment]
    for _ in range(8):
        if len(held) == 2:
            observe(*held.pop(0))
        scheduler.step()
    assert policy.outcomes
    assert all(outcome.verify_s > 0 for outcome in policy.outcomes)


@pytest.mark.parametrize(
    ("seconds", "step_s"), [([0.105, 0.005], 0.005), ([0.1, 0.1, 0.1, 0.005], 0.005), ([0.02] * 9 + [0.005], 0.02)]
)
def test_slow_steps_of_a_short_rest_are_accidents(seconds: list[float], step_s: float) -> None:
    """Or what drafts left the host to do; a long one knows what is usual."""
    rest = Rest(BatchView(np.arange(2), np.ones(2, np.int64), np.zeros(2), 2), {"a": 0, "b": 0}, 20, is_one=True)
    for _ in range(len(seconds) + 1):
        rest.take_step(0.0)
    rest.seconds.extend(seconds)
    assert rest.outcomes()[0].verify_s == step_s


def test_blocks_of_the_prefix_cache_that_the_draft_never_read_are_known_before_the_plan() -> None:
    policy = Recorded([0, 3])
    views: list[BatchView] = []
    plan = policy.plan
    policy.plan = lambda batch: views.append(batch) or plan(batch)  # type: ignore[func-returns-value, method-assign]
    controller = make(policy)
    scheduler = Scheduler(controller, 1)
    scheduler.step()
    late = scheduler.requests["late"] = Request("late", list(range(40)), num_computed_tokens=32)
    scheduled = {"r0": 1, "late": 8}
    late.num_computed_tokens += 8
    scheduler.requests["r0"].num_computed_tokens += 1
    output = SimpleNamespace(
        num_scheduled_tokens=scheduled,
        scheduled_spec_decode_tokens={},
        total_num_scheduled_tokens=9,
        scheduled_new_reqs=[SimpleNamespace(req_id="late", num_computed_tokens=32)],
        finished_req_ids=set(),
    )
    directive = controller.decide(output, scheduler.requests, 0)
    num_missed = views[-1].num_missed
    assert num_missed is not None
    assert num_missed.tolist() == [6, 39]  # and what the step reads besides
    assert directive.num_catch_up_tokens == 6 + 32


def test_a_look_without_drafts_decides_nothing() -> None:
    """Though a stop is left of what a stage took away. It lasts until such a step has been measured."""

    class Looking(Recorded):
        def plan(self, batch: BatchView) -> Plan:
            plan = super().plan(batch)
            plan.stop = StopByWorth(np.zeros(3), np.zeros(2), np.zeros(2), 0.0, 0.0, 0.0)
            return plan

    controller = make(Looking([3, 3, 0, 3, 3]))
    controller._takes_turns = controller._obeys_prediction = True
    scheduler = Scheduler(controller, 2)
    lengths = [max(scheduler.step().lengths.values()) for _ in range(8)]
    assert lengths == [3, 3, 3, 3, 0, 0, 3, 3]


def test_what_the_draft_reads_of_prompts_is_not_the_price_of_its_passes() -> None:
    policy = Recorded([2, 2, 2])
    scheduler = Scheduler(make(policy), 2, prompt=6)
    for _ in range(3):
        scheduler.step(accepted=1)
    assert [outcome.num_draft_prompt_tokens for outcome in policy.outcomes] == [6 + 7, 0]
    assert not any(outcome.num_catch_up_tokens for outcome in policy.outcomes)


def test_a_draft_that_nobody_asked_for_costs_nobody_anything() -> None:
    """EAGLE's runs in every step, whoever drafts."""
    policy = Recorded([0] * 4)
    controller = make(policy, can_skip=False)
    observe = controller.observe
    feedback = Feedback(verify_s=0.01, draft_s=0.003, step_s=0.013)
    controller.observe = lambda number, sampled, _: observe(number, sampled, feedback)  # type: ignore[method-assign]
    scheduler = Scheduler(controller, 1)
    for _ in range(4):
        scheduler.step()
    assert [outcome.draft_s for outcome in policy.outcomes] == [0.0] * 3


@pytest.mark.parametrize("wanted", [0, 2])
def test_who_wanted_drafts_and_must_wait_for_them_does_not_rest(wanted: int) -> None:
    """What the draft missed is not known yet: the next step tries again."""
    controller = make(Recorded([]))
    controller._takes_turns = controller._obeys_prediction = controller._settled.is_on = True
    view = BatchView(np.arange(1), np.full(1, 8), np.zeros(1), 1)
    decision = Decision(1, ["r0"], view, np.zeros(1, np.int64), None)
    controller._begin_rest(decision, Plan.wanting(wanted, view), {"r0": 0})
    assert (controller._rest is None) == bool(wanted)


def test_a_look_has_two_drafts_and_the_second_has_nothing_to_read() -> None:
    """Both are told, though the policy is asked once: what a draft takes is not known from one that had to catch up."""
    policy = Looking([0] * 3 + [2])
    controller = make(policy)
    controller._takes_turns = controller._pairs = True
    scheduler = Scheduler(controller, 2)
    drafted = [max(scheduler.step(accepted=1).lengths.values()) for _ in range(24)]
    first = drafted.index(2)
    assert drafted[first : first + 4] == [2, 2, 0, 0]
    told = [outcome for outcome in policy.outcomes if outcome.has_drafts]
    assert [outcome.num_catch_up_tokens > 0 for outcome in told] == [True, False]
    assert [outcome.accepted.tolist() for outcome in told] == [[1, 1]] * 2


def test_a_look_ends_with_a_request() -> None:
    """Who is left need not be who was looked at."""
    policy = Looking([2, 0])
    controller = make(policy)
    controller._takes_turns = controller._pairs = True
    scheduler = Scheduler(controller, 2)
    assert scheduler.step().longest == 2
    scheduler.end("r1")
    scheduler.lengths.pop("r1")
    assert scheduler.step().longest == 0
    assert [outcome.drafted.tolist() for outcome in policy.outcomes if outcome.has_drafts] == [[2]]


def test_a_look_is_told_with_what_it_delays() -> None:
    """The device was done with it long before the host was."""
    policy = Looking([0] * 3 + [2])
    controller = make(policy)
    controller._takes_turns = controller._pairs = True
    scheduler = Scheduler(controller, 2)
    while not scheduler.step().longest:
        pass
    assert isinstance(controller._clock, Clock)
    controller._clock.now += 0.05
    scheduler.step()
    first, second = [outcome for outcome in policy.outcomes if outcome.has_drafts][-1], None
    scheduler.step()
    second = [outcome for outcome in policy.outcomes if outcome.has_drafts][-1]
    assert first.delay_s == 0
    # Two drafts of two passes, of which the first has been told, and what the host took.
    assert second.delay_s == pytest.approx(2 * 0.002 + 0.05)


def test_a_look_beside_prompts_says_nothing_of_delays() -> None:
    policy = Looking([2])
    controller = make(policy)
    controller._takes_turns = controller._pairs = True
    scheduler = Scheduler(controller, 2)
    for _ in range(3):
        scheduler.step()
    assert [outcome.delay_s for outcome in policy.outcomes if outcome.has_drafts] == [0, 0]


def test_steps_that_nobody_is_told_of_are_counted() -> None:
    policy = Recorded([3, 3])
    controller = make(policy, num_in_flight=2)
    controller._takes_turns = controller._pairs = True
    scheduler = Scheduler(controller, 2)
    for _ in range(5):
        scheduler.step(accepted=2)
    told = sum(outcome.num_drafted for outcome in policy.outcomes)
    counted = controller.meter["num_draft_tokens"]
    assert (told, counted) == (12, 24)
    assert controller.meter["num_accepted_tokens"] == counted * 2 / 3


@pytest.mark.parametrize(
    ("kind", "num_graph_tokens", "is_odd"), [(Looking, 6, True), (Looking, 0, False), (Recorded, 6, False)]
)
def test_looks_at_few_are_odd_where_one_length_is_favoured(
    kind: type[Recorded], num_graph_tokens: int, is_odd: bool
) -> None:
    """Drafts of few that were chosen are what they are: whoever chooses such must learn what they take."""
    policy = kind([2, 2])
    plan = policy.plan

    def few(batch: BatchView) -> Plan:
        found: Plan = plan(batch)
        found.lengths[1:] = 0
        return found

    policy.plan = few  # type: ignore[method-assign]
    controller = make(policy, num_graph_tokens=num_graph_tokens)
    controller._takes_turns = controller._pairs = True
    scheduler = Scheduler(controller, 3)
    for _ in range(3):
        scheduler.step()
    assert {outcome.is_odd for outcome in policy.outcomes if outcome.has_drafts} == {is_odd}


@pytest.mark.parametrize("num_graph_tokens", [0, 512])
def test_steps_of_a_rest_that_read_a_prompt_are_measured_by_themselves(num_graph_tokens: int) -> None:
    """If at all: where there are graphs they go another way. Also where it is read in equal parts, step after step."""
    policy = Resting(LEAST_REST)
    controller = make(policy, exact_rooms=False, num_graph_tokens=num_graph_tokens)
    scheduler = Scheduler(controller, 8)
    scheduler.step()
    rest = controller._rest
    assert rest is not None
    scheduled = dict.fromkeys(scheduler.requests, 1) | {"long": 500}
    new = [SimpleNamespace(req_id="long", num_computed_tokens=0)]
    scheduler.requests["long"] = Request("long", list(range(2000)), is_prefill_chunk=True)
    for number in range(3):
        scheduler.requests["long"].num_computed_tokens += 500
        output = SimpleNamespace(
            num_scheduled_tokens=dict(scheduled),
            scheduled_spec_decode_tokens={},
            total_num_scheduled_tokens=508,
            scheduled_new_reqs=[] if number else new,
            finished_req_ids=set(),
        )
        directive = controller.decide(output, scheduler.requests, 0)
        assert directive.is_timed == (num_graph_tokens > 0)
        if directive.is_timed:
            controller.observe(directive.step, {}, Feedback(verify_s=0.03, step_s=0.05 + number))
    assert controller._rest is rest
    assert rest.num_steps == 3
    assert not rest.seconds
    told = rest.outcomes()[0].prompt_steps
    assert told == ([(500, 0.05), (500, 1.05), (500, 2.05)] if num_graph_tokens else [])


def test_few_of_many_steps_with_prompts_are_measured() -> None:
    batch = BatchView(np.arange(64), np.full(64, 4), np.zeros(64), 64, favours_one_length=True)
    lengths = {f"r{i}": 0 for i in range(64)}
    rest, is_timed = Rest(batch, lengths, 128, is_one=True, is_open=True), []
    for number in range(15):
        scheduled = dict.fromkeys(lengths, 1) | {f"new{number}": 30}
        new = [SimpleNamespace(req_id=f"new{number}")]
        output = SimpleNamespace(
            num_scheduled_tokens=scheduled, scheduled_spec_decode_tokens={}, scheduled_new_reqs=new
        )
        if not rest.admits(output):
            break
        rest.take_step(0.0)
        is_timed.append(rest.is_timed)
    assert is_timed == [True] * 4 + [False] * 4


def test_a_look_behind_drafts_says_nothing_of_delays() -> None:
    """What is late is theirs."""
    policy = Looking([0] * 3 + [2])
    controller = make(policy)
    controller._takes_turns = controller._pairs = True
    scheduler = Scheduler(controller, 2)
    while not scheduler.step().longest:
        assert controller._latest is not None
        controller._latest.num_catch_up_tokens = 1  # the draft is run for somebody
    assert controller._look is not None
    for _ in range(2):
        scheduler.step()
    assert [outcome.delay_s for outcome in policy.outcomes if outcome.has_drafts] == [0, 0]


@pytest.mark.parametrize(("num_graph_tokens", "is_odd"), [(12, True), (0, False)])
def test_steps_beside_prompts_are_odd_where_there_are_graphs(num_graph_tokens: int, is_odd: bool) -> None:
    policy = Recorded([2, 2, 2])
    scheduler = Scheduler(make(policy, exact_rooms=False, num_graph_tokens=num_graph_tokens), 3)
    scheduler.step()
    scheduler.requests["r9"] = Request("r9", list(range(40)))
    for _ in range(3):
        scheduler.step()
    beside = [outcome for outcome in policy.outcomes if outcome.num_prompt_tokens]
    others = [outcome for outcome in policy.outcomes if not outcome.num_prompt_tokens]
    assert [outcome.num_prompt_tokens for outcome in beside] == [40]
    assert {outcome.is_odd for outcome in beside} == {is_odd}
    assert {outcome.is_odd for outcome in others} == {False}


def test_whoever_ends_in_a_rest_has_had_as_many_tokens_as_steps() -> None:
    """Not those of the whole rest."""
    policy = Resting(100)
    controller = make(policy, exact_rooms=False)
    controller._pairs = True
    scheduler = Scheduler(controller, 8)
    told: list[Outcome] = []
    policy.observe = told.append  # type: ignore[method-assign]
    for _ in range(4):
        scheduler.step()
    scheduler.end("r3")
    for _ in range(20):
        scheduler.step()
    controller.forget(list(scheduler.requests))
    assert told[0].num_steps == 24
    assert told[0].num_emitted is not None
    assert told[0].num_emitted.tolist() == [24, 24, 24, 4, 24, 24, 24, 24]


def test_policies_know_how_much_requests_may_have_yet() -> None:
    policy = Resting(LEAST_REST)
    scheduler = Scheduler(make(policy, exact_rooms=False, max_model_len=30), 2)
    scheduler.requests["r1"].max_tokens = 4
    scheduler.step()
    assert policy.batches[0].num_left is not None
    assert policy.batches[0].num_left.tolist() == [24, 4]


def test_a_rest_goes_on_when_few_end_or_come() -> None:
    """The policy is not asked, and whoever came is behind: the draft has not read his prompt. Slots are not given again
    before the policy has heard of all."""
    policy = Resting(100)
    controller = make(policy, exact_rooms=False)
    scheduler = Scheduler(controller, 8)
    for _ in range(5):
        scheduler.step()
    scheduler.end("r3")
    scheduler.requests["new"] = Request("new", list(range(20)))
    for _ in range(5):
        assert scheduler.step().longest == 0
    assert len(policy.batches) == 1
    assert policy.forgotten == []
    assert controller.backlog.num_missed("new", 20) == 20
    assert "r3" not in controller.backlog
    scheduler.end("r4")  # too many by now
    scheduler.step()
    assert len(policy.batches) == 2
    assert sorted(policy.forgotten) == [3, 4]
    known = policy.batches[1]
    assert known.num_decoding == 7
    assert known.num_missed is not None
    assert known.num_missed.max() > 20
    assert controller.meter["num_steps"] == 11
    assert sum(controller.meter.lengths) == 5 * 8 + 5 * 8 + 7


def test_a_rest_that_nobody_announced_ends_with_whoever_comes() -> None:
    """It is there to have a step measured."""
    policy = make_policy("auto")
    scheduler = Scheduler(make(policy, exact_rooms=False), 8)
    scheduler.step()
    controller = scheduler.controller
    assert controller._rest is not None
    scheduler.requests["new"] = Request("new", list(range(20)))
    scheduler.step()
    assert controller._rest is None or controller._rest.num_steps == 0


def test_the_step_behind_an_open_rest_reads_no_prompts() -> None:
    """Whoever came meanwhile decodes like all others."""
    policy = Resting(LEAST_REST)
    controller = make(policy, exact_rooms=False)
    scheduler = Scheduler(controller, 8)
    scheduler.step()
    scheduler.requests["new"] = Request("new", list(range(20)))
    for _ in range(LEAST_REST + 2):
        scheduler.step()
    drafting = [outcome for outcome in policy.outcomes if outcome.has_drafts]
    assert [(outcome.num_prompt_tokens, outcome.num_decoding) for outcome in drafting] == [(0, 9)]


def test_one_that_was_preempted_is_read_from_its_beginning() -> None:
    """What the draft had read of it is gone with its blocks."""
    controller = make(Recorded([2, 2, 0, 0]), exact_rooms=False)
    scheduler = Scheduler(controller, 2)
    for _ in range(3):
        scheduler.step()
    request = scheduler.requests["r0"]
    assert controller.backlog.num_missed("r0", request.num_tokens) < request.num_tokens
    output = SimpleNamespace(
        num_scheduled_tokens={"r0": request.num_tokens, "r1": 1},
        scheduled_spec_decode_tokens={},
        total_num_scheduled_tokens=request.num_tokens + 1,
        scheduled_new_reqs=[],
        finished_req_ids=set(),
    )
    request.num_computed_tokens = request.num_tokens
    scheduler.requests["r1"].num_computed_tokens += 1
    controller.decide(output, scheduler.requests, 0)
    assert controller.backlog.num_missed("r0", request.num_tokens) == request.num_tokens


@pytest.mark.parametrize(("num_graph_tokens", "drafts"), [(0, 3), (64, 0)])
def test_few_do_not_draft_while_most_catch_up_where_one_length_is_favoured(num_graph_tokens: int, drafts: int) -> None:
    policy = Recorded([0, 2, 2])
    controller = make(policy, exact_rooms=False, catch_up_budget=24, num_graph_tokens=num_graph_tokens)
    scheduler = Scheduler(controller, 8)
    scheduler.step()
    directive = scheduler.step()
    assert directive.num_catch_up_tokens > 0
    assert sum(length > 0 for length in directive.lengths.values()) == drafts
