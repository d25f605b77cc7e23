"""What a run measures, as data: it is written into the results, and the same again means the same measurement."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, NamedTuple

from dsde.bench.arrivals import parse_arrivals
from dsde.core.errors import InvalidInput

Traced = Literal["first", "all"]
BASE = "off"
"""the contender that all others are compared with; always there"""


class CellKey(NamedTuple):
    """One circumstance under which all contenders are compared."""

    workload: str
    batch_size: int
    temperature: float


@dataclass(frozen=True, slots=True)
class Setting:
    policies: tuple[str, ...] = ("off", "static:2", "static:4", "static:8", "svip", "adaedl", "tapout", "dsde", "auto")
    workloads: tuple[str, ...] = ("mixed",)
    batch_sizes: tuple[int, ...] = (1,)
    temperatures: tuple[float, ...] = (0.0,)
    num_requests: int = 12
    """of every workload; a batch takes at least as many as it has places"""
    max_tokens: int = 96
    rounds: int = 3
    arrival: str = "closed"
    seed: int = 0
    """of the order of prompts, of sampled texts and of arrivals"""
    target: str | None = None
    draft: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    peers: tuple[str, ...] = ()
    preset: str | None = None
    traced: Traced = "first"
    """whether the steps of one request or of all are written down, in a pass that is not timed"""

    def __post_init__(self) -> None:
        for name in ("num_requests", "max_tokens", "rounds"):
            _check_whole(name, getattr(self, name))
        for size in self.batch_sizes:
            _check_whole("a batch size", size)
        for temperature in self.temperatures:
            if not 0 <= temperature <= 10:
                raise InvalidInput(f"a temperature must be between 0 and 10, not {temperature}")
        for name in ("policies", "workloads", "batch_sizes", "temperatures"):
            if not getattr(self, name):
                raise InvalidInput(f"{name} must not be empty")
        parse_arrivals(self.arrival)

    def requests_at(self, batch_size: int) -> int:
        return max(self.num_requests, batch_size)

    def cells(self) -> Iterator[CellKey]:
        for workload in self.workloads:
            for batch_size in self.batch_sizes:
                for temperature in self.temperatures:
                    yield CellKey(workload, batch_size, temperature)

    def to_dict(self) -> dict[str, Any]:
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}

    @staticmethod
    def from_dict(values: dict[str, Any]) -> Setting:
        given: dict[str, Any] = {}
        for name in {field.name for field in fields(Setting)} & values.keys():
            given[name] = tuple(values[name]) if isinstance(values[name], list) else values[name]
        return Setting(**given)


def _check_whole(name: str, value: int) -> None:
    if value < 1:
        raise InvalidInput(f"{name.replace('_', ' ')} must be at least 1, not {value}")
