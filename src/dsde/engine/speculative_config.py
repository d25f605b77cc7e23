"""The field's way of asking for speculation: one JSON object, with the key names that vLLM gave it."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, replace
from typing import Any

from dsde.core.errors import InvalidInput
from dsde.policies import Policy


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """Which draft, which policy. `model` and `num_speculative_tokens` are vLLM's words for draft and static length."""

    draft: str | None = None
    policy: str | Policy | None = None
    prompt_lookup_max: int = 4
    prompt_lookup_min: int = 2

    @staticmethod
    def parse(value: dict[str, Any] | str | None) -> SpeculativeConfig:
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except json.JSONDecodeError as error:
                raise InvalidInput(f"speculative_config is not valid JSON: {error}.") from None
        if value is None:
            return SpeculativeConfig()
        if not isinstance(value, dict):
            raise InvalidInput('speculative_config must be an object such as {"model": "ngram"}.')
        return _from_keys(dict(value))

    def over(self, draft: str | None, policy: str | Policy | None) -> SpeculativeConfig:
        """Fill what it leaves open from `LLM`'s own arguments."""
        return replace(self, draft=self.draft or draft, policy=self.policy or policy)


def _from_keys(keys: dict[str, Any]) -> SpeculativeConfig:
    config = SpeculativeConfig()
    method = keys.pop("method", None)
    if method not in (None, "draft_model", "ngram"):
        raise InvalidInput(f'speculative_config: method must be "draft_model" or "ngram", got {method!r}.')
    draft = keys.pop("model", "ngram" if method == "ngram" else None)
    if draft is not None:
        config = replace(config, draft=str(draft))
    length = keys.pop("num_speculative_tokens", None)
    if length is not None:
        if isinstance(length, bool) or not isinstance(length, int) or length < 0:
            raise InvalidInput(f"speculative_config: num_speculative_tokens must be a whole number, got {length!r}.")
        config = replace(config, policy=f"static:{length}" if length else "off")
    known = {field.name for field in fields(SpeculativeConfig)}
    for name, value in keys.items():
        if name not in known:
            allowed = ", ".join(["method", "model", "num_speculative_tokens", *sorted(known)])
            raise InvalidInput(f"speculative_config has no key {name!r}; it knows {allowed}.")
        if name.startswith("prompt_lookup") and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise InvalidInput(f"speculative_config: {name} must be a whole number of at least 1, got {value!r}.")
        config = replace(config, **{name: value})
    if config.prompt_lookup_min > config.prompt_lookup_max:
        raise InvalidInput("speculative_config: prompt_lookup_min must be at most prompt_lookup_max.")
    return config
