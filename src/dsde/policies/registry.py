"""Policies by name: from `"dsde:preset=release"` on a command line to an object. Knows every policy, and no engine.

A spec is a policy followed by any number of stages, `policy|stage|stage`. Each is a name, or a name and options,
`name:option=value,option=value`; the first option may be given by its value alone, as in `static:4`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

from dsde.core.errors import InvalidInput
from dsde.policies.adaedl import AdaEDL
from dsde.policies.adaptiveverify import AdaptiveVerify
from dsde.policies.adaserve import AdaServe, DepthByLoad
from dsde.policies.auto import Auto
from dsde.policies.banditspec import EXP3Spec, UCBSpec
from dsde.policies.base import Policy, Stage
from dsde.policies.batchtable import EXAMPLE, BatchTable
from dsde.policies.budgetcap import BudgetCap
from dsde.policies.confidence import Confidence
from dsde.policies.consultant import ConsultantStage
from dsde.policies.ddd import DDD
from dsde.policies.dsde import DSDE
from dsde.policies.gammatune import GammaTune
from dsde.policies.gammatuneplus import GammaTunePlus
from dsde.policies.gate import OnOffGate
from dsde.policies.goodput import Goodput
from dsde.policies.heuristic import Heuristic
from dsde.policies.limits import check_choice
from dsde.policies.margin import Margin
from dsde.policies.meancap import MeanCap
from dsde.policies.nightjar import Nightjar
from dsde.policies.off import Off
from dsde.policies.percentilecap import PercentileCap
from dsde.policies.rounding import Rounding
from dsde.policies.static import Static
from dsde.policies.svip import SVIP
from dsde.policies.tapout import TapOut
from dsde.policies.tetris import Tetris

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
    first, *rest = (part.strip() for part in _split(spec, "|"))
    policy = _build(first, POLICIES, "policy")
    for part in rest:
        policy = policy | _build(part, STAGES, "stage")
    return policy


def split_specs(text: str) -> list[str]:
    """Specs between commas, each once, without those commas that belong to one: in brackets, or before an `option=`."""
    specs: list[str] = []
    for piece in _split(text, ","):
        if specs and re.match(r"\s*\w+\s*=", piece):
            specs[-1] += f",{piece}"
        else:
            specs.append(piece)
    return list(dict.fromkeys(spec.strip() for spec in specs))


def _build(part: str, entries: Mapping[str, Entry[T]], kind: str) -> T:
    name = _name(part)
    if name not in entries:
        if name in POLICIES or name in STAGES:
            other = "policy" if kind == "stage" else "stage"
            raise InvalidInput(
                f"{name!r} is a {other} where a {kind} is expected; write policy|stage, as in static:4|meancap"
            )
        what = f"unknown {kind} {name!r}" if name else f"a {kind} is missing"
        raise InvalidInput(f"{what}; known are {', '.join(entries)}")
    entry = entries[name]
    try:
        return entry.build(_parse_options(part.partition(":")[2], entry.options))
    except InvalidInput as error:
        raise InvalidInput(f"{kind} {part!r}: {error}") from None


def _name(part: str) -> str:
    return part.partition(":")[0].strip()


def _parse_options(text: str, names: tuple[str, ...]) -> dict[str, str]:
    options: dict[str, str] = {}
    for index, item in enumerate(_split(text, ",") if text.strip() else []):
        key, equals, value = (piece.strip() for piece in item.partition("="))
        if index == 0 and names and (not equals or key.startswith("[")):
            key, value = names[0], item.strip()
        if key not in names:
            allowed = f"allowed are {', '.join(names)}" if names else "it takes none"
            raise InvalidInput(f"unknown option {key!r}; {allowed}")
        if key in options:
            raise InvalidInput(f"{key} is given twice")
        options[key] = value
    return options


def _split(text: str, separator: str) -> list[str]:
    """Not within brackets: a table, or a list of lengths or policies, is one value."""
    items, depth = [""], 0
    for letter in text:
        depth += (letter == "[") - (letter == "]")
        if letter == separator and depth <= 0:
            items.append("")
        else:
            items[-1] += letter
    return items


def _words(options: Options, *names: str) -> dict[str, Any]:
    """Those of the named options that were given, as they are."""
    return {name: options[name] for name in names if name in options}


def _numbers(options: Options, *names: str) -> dict[str, Any]:
    """Likewise, as whole numbers."""
    return {name: _number_or_text(int, value) for name, value in _words(options, *names).items()}


def _floats(options: Options, *names: str) -> dict[str, Any]:
    """Likewise, as real numbers."""
    return {name: _number_or_text(float, value) for name, value in _words(options, *names).items()}


def _number_or_text(kind: type[int] | type[float], text: str) -> float | str:
    """What is no number stays text: the policy knows the range to name."""
    try:
        return kind(text)
    except ValueError:
        return text


def _make_static(options: Options) -> Policy:
    if "length" not in options:
        raise InvalidInput("the length is missing; write it as in static:4")
    return Static(**_numbers(options, "length"))


def _make_dsde(options: Options) -> Policy:
    cap = options.get("cap", "mean")
    check_choice("cap", cap, ("mean", "off"))
    whole = _numbers(options, "min", "max", "initial", "warmup", "short", "long")
    policy = DSDE(options.get("preset", "paper"), **whole, **_floats(options, "decay"))
    return policy if cap == "off" else policy | MeanCap(policy.preset.rounding)


def _make_heuristic(options: Options) -> Policy:
    return Heuristic(**_numbers(options, "initial", "max"), **_words(options, "schedule"))


def _make_gammatune(options: Options) -> Policy:
    return GammaTune(**_numbers(options, "initial", "delta", "min", "max"), **_floats(options, "eta"))


def _make_gammatuneplus(options: Options) -> Policy:
    numbers = _numbers(options, "initial", "delta", "min", "max")
    return GammaTunePlus(**_floats(options, "tau", "eta"), **numbers)


def _make_tetris(options: Options) -> Policy:
    return _drafted_length(options) | Tetris(**_numbers(options, "budget"))


def _make_adaptiveverify(options: Options) -> Policy:
    return _drafted_length(options) | AdaptiveVerify()


def _drafted_length(options: Options) -> Policy:
    return Static(**{"length": 4, **_numbers(options, "length")})


def _make_adaserve(options: Options) -> Policy:
    budget = _numbers(options, "budget")
    return DepthByLoad(**budget, **_numbers(options, "min", "max")) | AdaServe(**budget)


def _make_ucbspec(options: Options) -> Policy:
    return UCBSpec(**_words(options, "lengths", "reward"), **_floats(options, "delta", "exploration", "discount"))


def _make_exp3spec(options: Options) -> Policy:
    return EXP3Spec(**_words(options, "lengths", "reward"), **_numbers(options, "seed"))


def _make_batchtable(options: Options) -> Policy:
    if "table" not in options:
        raise InvalidInput(f"the table is missing; write it as in batchtable:{EXAMPLE}")
    return BatchTable(options["table"], **_numbers(options, "max"))


def _make_svip(options: Options) -> Policy:
    return SVIP(**_floats(options, "h", "c"), **_numbers(options, "max"))


def _make_adaedl(options: Options) -> Policy:
    reals = ("gamma", "threshold", "alpha", "epsilon", "beta1", "beta2")
    return AdaEDL(**_floats(options, *reals), **_numbers(options, "max"))


def _make_confidence(options: Options) -> Policy:
    return Confidence(**_floats(options, "threshold"), **_numbers(options, "max"))


def _make_ddd(options: Options) -> Policy:
    return DDD(**_floats(options, "tau"), **_numbers(options, "max"))


def _make_margin(options: Options) -> Policy:
    return Margin(**_floats(options, "least"), **_numbers(options, "max"))


def _make_tapout(options: Options) -> Policy:
    text = options.get("policies", "[svip,adaedl,confidence,margin]")
    if not (text.startswith("[") and text.endswith("]")):
        raise InvalidInput(f"policies must be a list as in [svip,adaedl,static:4], not {text!r}")
    arms = [(name, make_policy(name)) for name in split_specs(text[1:-1].replace(";", ","))]
    return TapOut(
        arms, **_words(options, "method", "reward"), **_floats(options, "discount"), **_numbers(options, "seed")
    )


def _make_goodput(options: Options) -> Policy:
    return Goodput(**_words(options, "per"), **_numbers(options, "max"))


def _make_nightjar(options: Options) -> Policy:
    return Nightjar(**_numbers(options, "max", "seed"))


def _make_percentilecap(options: Options) -> Stage:
    return PercentileCap(**_numbers(options, "percentile"))


def _make_budgetcap(options: Options) -> Stage:
    if "tokens" not in options:
        raise InvalidInput("the number of tokens is missing; write it as in budgetcap:64")
    return BudgetCap(**_numbers(options, "tokens"))


def _make_consultant(options: Options) -> Stage:
    return ConsultantStage(**_floats(options, "epsilon", "decay"))


def _make_meancap(options: Options) -> Stage:
    return MeanCap(cast(Rounding, options.get("rounding", "nearest")))


POLICIES: dict[str, Entry[Policy]] = {
    entry.name: entry
    for entry in (
        Entry[Policy]("off", "no speculation: plain decoding of the target", lambda _: Off(), example="off"),
        Entry[Policy]("static", "the same length for everybody", _make_static, ("length",), "static:4"),
        Entry[Policy](
            "auto",
            "every token must earn more than it costs: acceptance and costs learnt online (docs/auto.md)",
            lambda options: Auto(**_numbers(options, "max")),
            ("max",),
            "auto:12",
        ),
        Entry[Policy](
            "dsde",
            "length from the stability of the KLD, capped at the batch mean (arXiv 2509.01083)",
            _make_dsde,
            ("preset", "min", "max", "initial", "warmup", "cap", "decay", "short", "long"),
            "dsde:release,max=10",
        ),
        Entry[Policy](
            "heuristic",
            "two tokens more after a draft was accepted whole, else one fewer (Hugging Face transformers)",
            _make_heuristic,
            ("initial", "max", "schedule"),
            "heuristic:5,max=20",
        ),
        Entry[Policy](
            "gammatune",
            "moving average of accepted tokens, with jumps after success (arXiv 2504.00030; reconstruction)",
            _make_gammatune,
            ("initial", "eta", "delta", "min", "max"),
            "gammatune:4,eta=0.3,max=10",
        ),
        Entry[Policy](
            "gammatune+",
            "the same, and stops before a token that the draft is not sure of (arXiv 2504.00030; reconstruction)",
            _make_gammatuneplus,
            ("tau", "initial", "eta", "delta", "min", "max"),
            "gammatune+:0.3",
        ),
        Entry[Policy](
            "ucbspec",
            "BanditSpec: the length whose upper confidence bound is highest, one for the batch (arXiv 2505.15141)",
            _make_ucbspec,
            ("lengths", "reward", "delta", "exploration", "discount"),
            "ucbspec:[0,2,4,8],reward=rate",
        ),
        Entry[Policy](
            "exp3spec",
            "BanditSpec: a length drawn by its past losses, one for the batch (arXiv 2505.15141)",
            _make_exp3spec,
            ("lengths", "reward", "seed"),
            "exp3spec:[0,2,4,8],seed=1",
        ),
        Entry[Policy](
            "batchtable",
            "one length by batch size from a table, as vLLM's num_speculative_tokens_per_batch_size",
            _make_batchtable,
            ("table", "max"),
            f"batchtable:{EXAMPLE}",
        ),
        Entry[Policy](
            "svip",
            "stops behind a token of high entropy (arXiv 2411.18462)",
            _make_svip,
            ("h", "c", "max"),
            "svip:0.3,c=0.15",
        ),
        Entry[Policy](
            "adaedl",
            "stops before a token of high entropy, by an adaptive threshold (arXiv 2410.18351; reconstruction)",
            _make_adaedl,
            ("gamma", "max", "threshold", "alpha", "epsilon", "beta1", "beta2"),
            "adaedl:gamma=0.2",
        ),
        Entry[Policy](
            "confidence",
            "stops behind an unlikely token, by a threshold learnt from what stood (arXiv 2405.04304, Hugging Face)",
            _make_confidence,
            ("threshold", "max"),
            "confidence:0.4",
        ),
        Entry[Policy](
            "ddd",
            "stops when the whole draft has become unlikely, in chain form (arXiv 2409.00142; reconstruction)",
            _make_ddd,
            ("tau", "max"),
            "ddd:-0.6",
        ),
        Entry[Policy](
            "margin",
            "stops before a token with a close rival (an arm of TapOut, arXiv 2511.02017; reconstruction)",
            _make_margin,
            ("least", "max"),
            "margin:0.2",
        ),
        Entry[Policy](
            "goodput",
            "most tokens a second by measured cost: SmartSpec, TurboSpec (arXiv 2406.14066; reconstruction)",
            _make_goodput,
            ("max", "per"),
            "goodput:12,per=sequence",
        ),
        Entry[Policy](
            "nightjar",
            "a bandit over lengths by batch size, off included (arXiv 2512.22420; reconstruction)",
            _make_nightjar,
            ("max", "seed"),
            "nightjar:5",
        ),
        Entry[Policy](
            "tetris",
            "verifies only the batch's likeliest drafted tokens, so many of them (arXiv 2502.15197; reconstruction)",
            _make_tetris,
            ("budget", "length"),
            "tetris:64,length=4",
        ),
        Entry[Policy](
            "adaptiveverify",
            "verifies as many of the likeliest as bring most tokens a second (vLLM, for DSpark; reconstruction)",
            _make_adaptiveverify,
            ("length",),
            "adaptiveverify:4",
        ),
        Entry[Policy](
            "adaserve",
            "verifies what requests need to meet slo_tpot_ms, then the likeliest (arXiv 2501.12162; reconstruction)",
            _make_adaserve,
            ("budget", "min", "max"),
            "adaserve:64,min=4,max=8",
        ),
        Entry[Policy](
            "tapout",
            "a bandit over any policies and stops, one for the batch and step (arXiv 2511.02017; reconstruction)",
            _make_tapout,
            ("policies", "method", "reward", "discount", "seed"),
            "tapout:[svip,adaedl,static:4],method=thompson",
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
        Entry[Stage](
            "percentilecap",
            "nobody drafts more than a percentile of what the batch wants",
            _make_percentilecap,
            ("percentile",),
            "dsde:cap=off|percentilecap:75",
        ),
        Entry[Stage](
            "budgetcap",
            "the batch drafts no more than so many tokens, the longest drafts lowered first",
            _make_budgetcap,
            ("tokens",),
            "static:4|budgetcap:64",
        ),
        Entry[Stage](
            "gate",
            "no speculation while it measurably costs more than it brings",
            lambda _: OnOffGate(),
            example="dsde|gate",
        ),
        Entry[Stage](
            "tetris",
            "of what any policy drafts, only the batch's likeliest tokens are verified, so many of them",
            lambda options: Tetris(**_numbers(options, "budget")),
            ("budget",),
            "dsde|tetris:64",
        ),
        Entry[Stage](
            "adaptiveverify",
            "of what any policy drafts, as many of the likeliest are verified as bring most tokens a second",
            lambda _: AdaptiveVerify(),
            example="dsde|adaptiveverify",
        ),
        Entry[Stage](
            "adaserve",
            "of what any policy drafts, what requests need to meet slo_tpot_ms is verified, then the likeliest",
            lambda options: AdaServe(**_numbers(options, "budget")),
            ("budget",),
            "svip|adaserve:64",
        ),
        Entry[Stage](
            "consultant",
            "Consultant Decoding: tokens stand that the target finds likely enough (reconstruction)",
            _make_consultant,
            ("epsilon", "decay"),
            "static:8|consultant:2",
            lossless=False,
        ),
    )
}
