"""From logits to a distribution to a token, exactly as a request asks. Knows nothing of drafts or of scheduling."""

from dsde.sampling.distribution import Distributions, Rows, distributions
from dsde.sampling.sampler import Sampler

__all__ = ["Distributions", "Rows", "Sampler", "distributions"]
