"""What a user asks of the plugin, from vLLM's `additional_config` or the environment. Knows nothing of vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from dsde.core.errors import InvalidInput
from dsde.core.params import DEFAULT_POLICY


@dataclass(frozen=True)
class Settings:
    policy: str = DEFAULT_POLICY
    graphs: bool = True
    """capture CUDA graphs for every length that a whole batch may have, 0 included; vLLM has them for the largest"""
    trace: str | None = None
    """file that gets one JSON line for every request and step"""


def read_settings(additional_config: object, environment: Mapping[str, str]) -> Settings | None:
    """None: nobody asked for the plugin. Raises InvalidInput, naming the setting that is wrong."""
    given = additional_config.get("dsde") if isinstance(additional_config, Mapping) else None
    policy = environment.get("DSDE_POLICY", "").strip()
    if given is None and not policy:
        return None
    if given is None or given is True:
        given = {}
    elif isinstance(given, str):
        given = {"policy": given}
    if not isinstance(given, Mapping):
        raise InvalidInput(f'additional_config: dsde must be settings as in {{"policy": "auto"}}, not {given!r}')
    # What is said in the command line comes before what lies about in the environment.
    values: dict[str, Any] = ({"policy": policy} if policy else {}) | dict(given)
    kinds = {field.name: field.type for field in fields(Settings)}
    for name, value in values.items():
        if name not in kinds:
            raise InvalidInput(f"additional_config: dsde has no setting {name!r}; it has {', '.join(kinds)}")
        kind = bool if kinds[name] == "bool" else str
        if not isinstance(value, kind):
            raise InvalidInput(f"additional_config: dsde.{name} must be a {kind.__name__}, not {value!r}")
    return Settings(**values)
