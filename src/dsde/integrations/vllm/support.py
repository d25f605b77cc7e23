"""Which policies can work where: what a policy needs against what vLLM's way of drafting and scheduling has to give."""

from __future__ import annotations

from dsde.core.errors import InvalidInput
from dsde.policies import (
    AdaptiveVerify,
    AdaServe,
    Auto,
    ConsultantStage,
    EXP3Spec,
    Need,
    Policy,
    Stage,
    Staged,
    StoppingPolicy,
    TapOut,
    Tetris,
    UCBSpec,
    make_policy,
)
from dsde.policies.gammatuneplus import GammaTunePlus

WITH_MODEL = ("draft_model", "eagle", "eagle3", "mtp")
"""methods of vLLM whose drafts have a distribution"""
METHODS = (*WITH_MODEL, "ngram")

_LOOKS_AT_DRAFTS = (StoppingPolicy, GammaTunePlus, TapOut)
_PAIRS = (Auto, EXP3Spec, UCBSpec, TapOut, StoppingPolicy)
"""those that take an outcome for that of their latest plan"""


def parts(policy: Policy) -> list[Policy | Stage]:
    return [policy.policy, *policy.stages] if isinstance(policy, Staged) else [policy]


def make_supported(spec: str, method: str) -> Policy:
    """The policy of that name. Raises InvalidInput where there is none, or it cannot work with this way of drafting."""
    if method not in METHODS:
        raise InvalidInput(f"dsde works with vLLM's {', '.join(METHODS)}, not with speculative method {method!r}")
    policy = make_policy(spec)
    for part in parts(policy):
        if isinstance(part, ConsultantStage):
            raise InvalidInput(
                f"policy {spec!r}: consultant accepts more than is lossless, and vLLM's verdict does not"
            )
        if isinstance(part, (Tetris, AdaptiveVerify, AdaServe)):
            raise InvalidInput(
                f"policy {spec!r}: vLLM verifies all that was drafted, and this policy would choose among it; "
                "try auto, goodput:per=sequence or dsde|budgetcap:64"
            )
        if isinstance(part, _LOOKS_AT_DRAFTS):
            raise InvalidInput(
                f"policy {spec!r}: it ends drafts while they are made, and vLLM fixes their lengths before; "
                "try auto, dsde or goodput"
            )
    if wants_signals(policy) and method not in WITH_MODEL:
        raise InvalidInput(
            f"policy {spec!r} looks at the draft's distribution, and {method} has none; "
            "try goodput, static:4, gammatune or static:4|gate"
        )
    return policy


def needs_of(policy: Policy) -> Need:
    """What it wants to know of drafts, but for what is only good for ending them while they are made."""
    return policy.needs & ~Need.DRAFT_SIGNALS if looks_ahead(policy) else policy.needs


def wants_signals(policy: Policy) -> bool:
    return bool(needs_of(policy) & (Need.KLD | Need.TOKEN_PROB | Need.DRAFT_SIGNALS))


def takes_turns(policy: Policy) -> bool:
    """Whether it must have seen what came of a plan before it makes another: it pays for what it tries, or says who
    earned what."""
    return bool(policy.cost_models) or pairs(policy)


def pairs(policy: Policy) -> bool:
    """Whether it takes every outcome for that of its latest plan."""
    return any(isinstance(part, _PAIRS) for part in parts(policy))


def looks_ahead(policy: Policy) -> bool:
    """Whether its lengths are upper bounds for a rule that vLLM cannot apply, so that its prediction counts instead."""
    return any(isinstance(part, Auto) for part in parts(policy))
