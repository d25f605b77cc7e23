"""From a spec on the command line to a policy, and what a person is told when the spec is wrong."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsde.core.errors import InvalidInput
from dsde.policies import DSDE, POLICIES, STAGES, Entry, MeanCap, Off, Policy, Staged, Static, make_policy


def inner_dsde(policy: Policy) -> DSDE:
    if isinstance(policy, Staged):
        policy = policy.policy
    assert isinstance(policy, DSDE)
    return policy


def test_off_and_static() -> None:
    assert isinstance(make_policy("off"), Off)
    for spec in ("static:4", "static:length=4", " static : 4 "):
        policy = make_policy(spec)
        assert isinstance(policy, Static)
        assert policy.length == 4


@pytest.mark.parametrize(
    ("spec", "preset", "rounding"),
    [
        ("dsde", "paper", "nearest"),
        ("dsde:paper", "paper", "nearest"),
        ("dsde:release", "release", "ceil"),
        ("dsde:preset=release", "release", "ceil"),
    ],
)
def test_dsde_carries_the_cap_of_its_preset(spec: str, preset: str, rounding: str) -> None:
    policy = make_policy(spec)
    assert isinstance(policy, Staged)
    assert inner_dsde(policy).preset.name == preset
    (stage,) = policy.stages
    assert isinstance(stage, MeanCap)
    assert stage.rounding == rounding


def test_dsde_options() -> None:
    preset = inner_dsde(make_policy("dsde:max=10,initial=4")).preset
    assert (preset.max, preset.initial) == (10, 4)
    preset = inner_dsde(make_policy("dsde:release, max = 12, min=3, warmup=100")).preset
    assert (preset.name, preset.max, preset.min, preset.warmup) == ("release", 12, 3, 100)


def test_the_cap_can_be_left_out() -> None:
    assert isinstance(make_policy("dsde:cap=off"), DSDE)
    assert isinstance(make_policy("dsde:cap=mean"), Staged)


def test_stages() -> None:
    policy = make_policy("static:4|meancap")
    assert isinstance(policy, Staged)
    assert isinstance(policy.policy, Static)
    assert [type(stage) for stage in policy.stages] == [MeanCap]
    policy = make_policy("dsde:cap=off | meancap:ceil")
    assert isinstance(policy, Staged)
    (stage,) = policy.stages
    assert isinstance(stage, MeanCap)
    assert stage.rounding == "ceil"


def test_every_call_makes_fresh_state() -> None:
    assert inner_dsde(make_policy("dsde")) is not inner_dsde(make_policy("dsde"))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("", "a policy is missing; known are " + ", ".join(POLICIES)),
        ("dsd", "unknown policy 'dsd'; known are " + ", ".join(POLICIES)),
        ("DSDE", "unknown policy 'DSDE'; known are " + ", ".join(POLICIES)),
        ("static", "policy 'static': the length is missing; write it as in static:4"),
        ("static:", "policy 'static:': the length is missing; write it as in static:4"),
        ("static:x", "policy 'static:x': length must be a whole number from 0 to 128, not 'x'"),
        ("static:2.5", "policy 'static:2.5': length must be a whole number from 0 to 128, not '2.5'"),
        ("static:length=", "policy 'static:length=': length must be a whole number from 0 to 128, not ''"),
        ("static:-1", "policy 'static:-1': length must be a whole number from 0 to 128, not -1"),
        ("static:4,5", "policy 'static:4,5': unknown option '5'; allowed are length"),
        ("static:4,length=5", "policy 'static:4,length=5': length is given twice"),
        ("off:3", "policy 'off:3': unknown option '3'; it takes none"),
        ("dsde:fast", "policy 'dsde:fast': preset must be one of paper, release, not 'fast'"),
        ("dsde:max=1", "policy 'dsde:max=1': max must be a whole number from 2 to 128, not 1"),
        ("dsde:release,max=5", "policy 'dsde:release,max=5': max must be a whole number from 6 to 128, not 5"),
        ("dsde:initial=a", "policy 'dsde:initial=a': initial must be a whole number from 1 to 128, not 'a'"),
        ("dsde:cap=no", "policy 'dsde:cap=no': cap must be one of mean, off, not 'no'"),
        (
            "dsde:window=3",
            "policy 'dsde:window=3': unknown option 'window'; allowed are "
            "preset, min, max, initial, warmup, cap, decay, short, long",
        ),
        (
            "dsde:max=9,",
            "policy 'dsde:max=9,': unknown option ''; allowed are "
            "preset, min, max, initial, warmup, cap, decay, short, long",
        ),
        ("dsde:decay=2", "policy 'dsde:decay=2': decay must be a number from 0.01 to 1, not 2.0"),
        ("dsde:short=40", "policy 'dsde:short=40': short must be a whole number from 2 to 30, not 40"),
        ("static:4|", "a stage is missing; known are " + ", ".join(STAGES)),
        ("static:4|mean", "unknown stage 'mean'; known are " + ", ".join(STAGES)),
        (
            "static:4|meancap:down",
            "stage 'meancap:down': rounding must be one of nearest, ceil, not 'down'",
        ),
        (
            "meancap",
            "'meancap' is a stage where a policy is expected; write policy|stage, as in static:4|meancap",
        ),
        (
            "dsde|static:4",
            "'static' is a policy where a stage is expected; write policy|stage, as in static:4|meancap",
        ),
    ],
)
def test_errors_name_what_is_wrong_and_what_is_allowed(spec: str, message: str) -> None:
    with pytest.raises(InvalidInput) as error:
        make_policy(spec)
    assert str(error.value) == message


@given(st.text(alphabet="abdefistcdmnx0149:=,| -", max_size=24))
def test_a_wrong_spec_is_never_anything_but_invalid_input(spec: str) -> None:
    with contextlib.suppress(InvalidInput):
        make_policy(spec)


@pytest.mark.parametrize("entry", [*POLICIES.values(), *STAGES.values()], ids=lambda entry: entry.name)
def test_every_entry_describes_itself(entry: Entry[Any]) -> None:
    assert entry.description
    assert "\n" not in entry.description
    assert entry.lossless == (entry.name != "consultant")
    make_policy(entry.example)


@pytest.mark.parametrize("entries", [POLICIES, STAGES])
def test_entries_are_filed_under_their_name(entries: dict[str, Entry[Any]]) -> None:
    assert all(name == entry.name for name, entry in entries.items())
