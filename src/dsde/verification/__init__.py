"""Which drafted tokens stand, and what comes after them. Knows nothing of policies or scheduling."""

from dsde.verification.acceptance import Verdict, verify
from dsde.verification.logprobs import top_logprobs

__all__ = ["Verdict", "top_logprobs", "verify"]
