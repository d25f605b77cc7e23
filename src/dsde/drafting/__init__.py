"""Who proposes tokens. Knows nothing of verification, policies or scheduling."""

from dsde.drafting.model import ModelDrafter
from dsde.drafting.ngram import NgramDrafter
from dsde.drafting.proposals import Drafter, DraftStep, Proposals

__all__ = ["DraftStep", "Drafter", "ModelDrafter", "NgramDrafter", "Proposals"]
