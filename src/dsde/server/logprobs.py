"""Log-probabilities as the two APIs want them."""

from __future__ import annotations

from typing import Any

from dsde.core.outputs import Logprob

Positions = list[dict[int, Logprob]]
"""for every token its own entry first, then the likeliest"""


LEAST = -9999.0
"""stands for minus infinity, which JSON does not have"""


def completion_logprobs(tokens: list[int], positions: Positions, first_offset: int) -> dict[str, Any]:
    """Offsets count characters of the tokens' own texts."""
    texts = [_text(position[token], token) for token, position in zip(tokens, positions, strict=True)]
    offsets = [first_offset]
    for text in texts:
        offsets.append(offsets[-1] + len(text))
    return {
        "tokens": texts,
        "token_logprobs": [_value(position[token]) for token, position in zip(tokens, positions, strict=True)],
        "top_logprobs": [{_text(one, token): _value(one) for token, one in position.items()} for position in positions],
        "text_offset": offsets[:-1],
    }


def chat_logprobs(tokens: list[int], positions: Positions, num_top: int) -> dict[str, Any]:
    content = []
    for token, position in zip(tokens, positions, strict=True):
        likeliest = [(one, other) for other, one in position.items() if one.rank <= num_top]
        likeliest.sort(key=lambda pair: pair[0].rank)
        top = [_entry(one, other) for one, other in likeliest]
        content.append({**_entry(position[token], token), "top_logprobs": top})
    return {"content": content, "refusal": None}


def _entry(one: Logprob, token: int) -> dict[str, Any]:
    text = _text(one, token)
    return {"token": text, "logprob": _value(one), "bytes": list(text.encode())}


def _text(one: Logprob, token: int) -> str:
    return f"token_id:{token}" if one.decoded_token is None else one.decoded_token


def _value(one: Logprob) -> float:
    return max(one.logprob, LEAST)
