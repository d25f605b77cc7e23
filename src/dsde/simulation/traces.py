"""Recorded agreement of a real pair of models as requests of a simulation.

A file is a JSON list of objects, one a request: `match` (1 where the greedy choices of target and draft agree) and `kl`
for every token; `overlap` (probability that a sampled token is accepted), `draft_entropy`, `draft_top_prob`,
`draft_margin` and `prompt_tokens` may be there. Recorded along the target's own text. Knows nothing of policies, costs
and time.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from dsde.core.errors import InvalidInput
from dsde.policies.base import FloatArray
from dsde.simulation.requests import Requests, check_size


class Recorded:
    """Requests in random order, each as often as the others (up to one), cut after `num_tokens` tokens.

    `sampled` draws agreement from `overlap`, as at temperature 1, instead of taking `match`.
    """

    def __init__(self, path: Path, *, sampled: bool = False) -> None:
        self.path, self.sampled = path, sampled
        self.records = _read(path)
        self.signals = {name: self._column(name) for name in ("match", "kl")}
        if sampled:
            self.signals["overlap"] = self._column("overlap")
        for name in ("draft_entropy", "draft_top_prob", "draft_margin"):
            if all(name in record for record in self.records):
                self.signals[name] = self._column(name)
        self.num_prompt_tokens = np.array([_prompt_tokens(path, record) for record in self.records], np.int64)

    def draw(self, num_requests: int, num_tokens: int, seed: int) -> Requests:
        num_recorded = np.array([values.size for values in self.signals["match"]])
        width = min(num_tokens, int(num_recorded.max()))
        check_size(num_requests, width)
        rng = np.random.default_rng(seed)
        rows = rng.permutation(np.resize(np.arange(len(self.records)), num_requests))
        tables = {name: _padded(values, width)[rows] for name, values in self.signals.items()}
        agreed = rng.random((num_requests, width)) < tables["overlap"] if self.sampled else tables["match"] > 0
        return Requests(
            num_tokens=np.minimum(num_recorded[rows], width),
            num_prompt_tokens=self.num_prompt_tokens[rows],
            agreed=agreed,
            klds=tables["kl"],
            entropies=tables.get("draft_entropy"),
            temperature=1.0 if self.sampled else 0.0,
            top_probs=tables.get("draft_top_prob"),
            margins=tables.get("draft_margin"),
        )

    def _column(self, name: str) -> list[FloatArray]:
        columns = []
        for number, record in enumerate(self.records, start=1):
            try:
                values = np.array(record[name], np.float64)
            except KeyError:
                raise InvalidInput(f"{self.path}: request {number} has no field {name!r}") from None
            except (TypeError, ValueError):
                values = np.empty(0)
            if values.ndim != 1 or not values.size or not np.isfinite(values).all() or (values < 0).any():
                raise InvalidInput(f"{self.path}: {name!r} of request {number} must be a list of numbers of at least 0")
            if values.size != len(record["match"]):
                raise InvalidInput(f"{self.path}: {name!r} and 'match' of request {number} differ in length")
            columns.append(values)
        return columns


def _read(path: Path) -> list[dict[str, Any]]:
    try:
        records = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidInput(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise InvalidInput(f"{path} is not valid JSON: {error}") from None
    if not isinstance(records, list) or not records or not all(isinstance(record, dict) for record in records):
        raise InvalidInput(f"{path} must hold a JSON list of recorded requests")
    return records


def _prompt_tokens(path: Path, record: dict[str, Any]) -> int:
    num = record.get("prompt_tokens", 0)
    if not isinstance(num, int) or num < 0:
        raise InvalidInput(f"{path}: prompt_tokens must be a whole number of at least 0, not {num!r}")
    return num


def _padded(rows: list[FloatArray], width: int) -> FloatArray:
    table = np.zeros((len(rows), width))
    for row, values in enumerate(rows):
        table[row, : values.size] = values[:width]
    return table
