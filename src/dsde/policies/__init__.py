"""How many tokens every sequence drafts. NumPy only: knows nothing of models, tokens or the engine."""

from dsde.policies.base import BatchView, Need, Outcome, Plan, Policy, Stage, Staged
from dsde.policies.dsde import DSDE
from dsde.policies.meancap import MeanCap
from dsde.policies.off import Off
from dsde.policies.presets import PAPER, PRESETS, RELEASE, Preset
from dsde.policies.registry import POLICIES, STAGES, Entry, make_policy
from dsde.policies.static import Static

__all__ = [
    "DSDE",
    "PAPER",
    "POLICIES",
    "PRESETS",
    "RELEASE",
    "STAGES",
    "BatchView",
    "Entry",
    "MeanCap",
    "Need",
    "Off",
    "Outcome",
    "Plan",
    "Policy",
    "Preset",
    "Stage",
    "Staged",
    "Static",
    "make_policy",
]
