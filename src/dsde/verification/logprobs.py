"""Log-probabilities to report, from the target's raw logits. Knows nothing of drafts."""

from __future__ import annotations

import torch

from dsde.core.outputs import Logprob


def top_logprobs(logits: torch.Tensor, tokens: list[int], count: int) -> list[dict[int, Logprob]]:
    """For every row the chosen token and the `count` most likely ones, the chosen one first."""
    log_probs = torch.log_softmax(logits.float(), -1)
    chosen_ids = torch.tensor(tokens, device=logits.device).unsqueeze(-1)
    chosen = log_probs.gather(-1, chosen_ids)
    ranks = ((log_probs > chosen).sum(-1) + 1).tolist()
    values, ids = log_probs.topk(min(count, log_probs.shape[-1]), dim=-1)
    result = []
    rows = zip(tokens, chosen.squeeze(-1).tolist(), ranks, ids.tolist(), values.tolist(), strict=True)
    for token, logprob, rank, top_ids, top_values in rows:
        entry = {token: Logprob(logprob, rank)}
        for place, (top_id, top_value) in enumerate(zip(top_ids, top_values, strict=True), start=1):
            entry.setdefault(top_id, Logprob(top_value, place))
        result.append(entry)
    return result
