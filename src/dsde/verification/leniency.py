"""Consultant Decoding's acceptance: by the target's surprise at the draft, averaged along it. Not lossless.

Knows nothing of who asked for it.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from dsde.core.consultant import Consultant
from dsde.core.sequence import Sequence
from dsde.drafting import Proposals


def consult(
    logits: torch.Tensor,
    sequences: list[Sequence],
    proposals: Proposals,
    starts: NDArray[np.int64],
    chosen: NDArray[np.bool_],
    rule: Consultant,
) -> NDArray[np.bool_]:
    """[sequences, K] which drafted tokens of the chosen sequences stand; writes what the average has become."""
    depths = np.arange(proposals.tokens.shape[1])
    stands = (depths < proposals.lengths[:, None]) & chosen[:, None]
    surprise = np.full(stands.shape, np.inf)
    index = torch.from_numpy((starts[:, None] + depths)[stands]).to(logits.device)
    tokens = proposals.tokens[torch.from_numpy(stands).to(proposals.tokens.device)]
    log_probs = torch.log_softmax(logits[index].float(), -1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    surprise[stands] = -log_probs.double().cpu().numpy()
    averages = np.array([s.surprise for s in sequences])
    going = chosen.copy()
    for depth in depths:
        drafted = going & (depth < proposals.lengths)
        averages[drafted] = rule.decay * averages[drafted] + (1 - rule.decay) * surprise[drafted, depth]
        fallen = drafted & (averages > rule.epsilon)
        averages[fallen] = 0.0
        going &= ~fallen
        stands[:, depth] &= going
    for i in np.flatnonzero(chosen):
        sequences[i].surprise = float(averages[i])
    return stands
