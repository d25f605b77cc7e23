"""Policies by name: from `"dsde:preset=release"` on a command line to an object. Knows every policy, and no engine.

A spec is a policy followed by any number of stages, `policy|stage|stage`. Each is a name, or a name and options,
`name:option=value,option=value`; the first option may be given by its value alone, as in `static:4`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

from dsde.core.errors import InvalidInput
from dsde.policies.base import Policy, Stage
from dsde.policies.dsde import DSDE
from dsde.policies.limits import check_choice
from dsde.policies.meancap import MeanCap
from dsde.policies.off import Off
from dsde.policies.rounding import Rounding
from dsde.policies.static import Static

Options = Mapping[str, str]
T = TypeVar("T", Policy, Stage)


@dataclass(frozen=True)
class Entry(Generic[T]):
    """A policy or stage that can be asked for by name."""

    name: str
    description: str
    build: Callable[[Options], T]
    options: tuple[str, ...] = ()
    """names of its options; the first may be given by value alone"""
    example: str = ""
    lossless: bool = True


def make_policy(spec: str) -> Policy:
    """The policy that `spec` names, with fresh state. Raises InvalidInput, naming the part that is wrong."""
    first, *rest = (part.strip() for part in spec.split("|"))
    policy = _build(first, POLICIES, "policy", "stage" if _name(first) in STAGES else None)
    for part in rest:
        policy = policy | _build(part, STAGES, "stage", "policy" if _name(part) in POLICIES else None)
    return policy


def _build(part: str, entries: Mapping[str, Entry[T]], kind: str, misplaced: str | None) -> T:
    name, known = _name(part), ", ".join(entries)
    if misplaced:
        raise InvalidInput(
            f"{name!r} is a {misplaced} where a {kind} is expected; write policy|stage, as in static:4|meancap"
        )
    if name not in entries:
        what = f"unknown {kind} {name!r}" if name else f"a {kind} is missing"
        raise InvalidInput(f"{what}; known are {known}")
    entry = entries[name]
    try:
        return entry.build(_parse_options(part.partition(":")[2], entry.options))
    except InvalidInput as error:
        raise InvalidInput(f"{kind} {part!r}: {error}") from None


def _name(part: str) -> str:
    return part.partition(":")[0].strip()


def _parse_options(text: str, names: tuple[str, ...]) -> dict[str, str]:
    options: dict[str, str] = {}
    for index, item in enumerate(text.split(",") if text.strip() else []):
        key, equals, value = (piece.strip() for piece in item.partition("="))
        if not equals and index == 0 and names:
            key, value = names[0], key
        if key not in names:
            allowed = f"allowed are {', '.join(names)}" if names else "it takes none"
            raise InvalidInput(f"unknown option {key!r}; {allowed}")
        if key in options:
            raise InvalidInput(f"{key} is given twice")
        options[key] = value
    return options


def _numbers(options: Options, *names: str) -> dict[str, Any]:
    """Those of the named options that were given. What is no number stays text: the policy knows the range to name."""
    return {name: _number_or_text(options[name]) for name in names if name in options}


def _number_or_text(text: str) -> int | str:
    try:
        return int(text)
    except ValueError:
        return text


def _make_static(options: Options) -> Policy:
    if "length" not in options:
        raise InvalidInput("the length is missing; write it as in static:4")
    return Static(**_numbers(options, "length"))


def _make_dsde(options: Options) -> Policy:
    cap = options.get("cap", "mean")
    check_choice("cap", cap, ("mean", "off"))
    policy = DSDE(options.get("preset", "paper"), **_numbers(options, "min", "max", "initial", "warmup"))
    return policy if cap == "off" else policy | MeanCap(policy.preset.rounding)


def _make_meancap(options: Options) -> Stage:
    return MeanCap(cast(Rounding, options.get("rounding", "nearest")))


POLICIES: dict[str, Entry[Policy]] = {
    entry.name: entry
    for entry in (
        Entry[Policy]("off", "no speculation: plain decoding of the target", lambda _: Off(), example="off"),
        Entry[Policy]("static", "the same length for everybody", _make_static, ("length",), "static:4"),
        Entry[Policy](
            "dsde",
            "length from the stability of the KLD, capped at the batch mean (arXiv 2509.01083)",
            _make_dsde,
            ("preset", "min", "max", "initial", "warmup", "cap"),
            "dsde:release,max=10",
        ),
    )
}
STAGES: dict[str, Entry[Stage]] = {
    entry.name: entry
    for entry in (
        Entry[Stage](
            "meancap",
            "nobody drafts more than the mean of what the batch wants",
            _make_meancap,
            ("rounding",),
            "static:4|meancap",
        ),
    )
}
