"""How many tokens every sequence drafts. NumPy only: knows nothing of models, tokens or the engine."""

from dsde.policies.adaedl import AdaEDL
from dsde.policies.adaptiveverify import AdaptiveVerify
from dsde.policies.adaserve import AdaServe
from dsde.policies.auto import Auto
from dsde.policies.banditspec import EXP3Spec, UCBSpec
from dsde.policies.base import FOREVER, BatchView, Need, Outcome, Pace, Plan, Policy, Stage, Staged
from dsde.policies.batchtable import BatchTable
from dsde.policies.budgetcap import BudgetCap
from dsde.policies.confidence import Confidence
from dsde.policies.consultant import ConsultantStage
from dsde.policies.cost import CostModel
from dsde.policies.ddd import DDD
from dsde.policies.dsde import DSDE
from dsde.policies.gammatune import GammaTune
from dsde.policies.gate import OnOffGate
from dsde.policies.goodput import Goodput
from dsde.policies.heuristic import Heuristic
from dsde.policies.margin import Margin
from dsde.policies.meancap import MeanCap
from dsde.policies.nightjar import Nightjar
from dsde.policies.off import Off
from dsde.policies.percentilecap import PercentileCap
from dsde.policies.presets import PAPER, PRESETS, RELEASE, Preset
from dsde.policies.registry import POLICIES, STAGES, Entry, make_policy, split_specs
from dsde.policies.static import Static
from dsde.policies.stopping import StoppingPolicy
from dsde.policies.svip import SVIP
from dsde.policies.tapout import TapOut
from dsde.policies.tetris import Tetris

__all__ = [
    "DDD",
    "DSDE",
    "FOREVER",
    "PAPER",
    "POLICIES",
    "PRESETS",
    "RELEASE",
    "STAGES",
    "SVIP",
    "AdaEDL",
    "AdaServe",
    "AdaptiveVerify",
    "Auto",
    "BatchTable",
    "BatchView",
    "BudgetCap",
    "Confidence",
    "ConsultantStage",
    "CostModel",
    "EXP3Spec",
    "Entry",
    "GammaTune",
    "Goodput",
    "Heuristic",
    "Margin",
    "MeanCap",
    "Need",
    "Nightjar",
    "Off",
    "OnOffGate",
    "Outcome",
    "Pace",
    "PercentileCap",
    "Plan",
    "Policy",
    "Preset",
    "Stage",
    "Staged",
    "Static",
    "StoppingPolicy",
    "TapOut",
    "Tetris",
    "UCBSpec",
    "make_policy",
    "split_specs",
]
