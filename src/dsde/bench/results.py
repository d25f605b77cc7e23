"""Everything a run has found, as it lies in results.json. Plain data; docs/bench.md describes the file.

Nothing in it is derived but `summary` and `tables`, which are written for readers without this program. Saved whole
after every round, so an interrupted run loses at most one.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from dsde.bench.setting import CellKey, Setting
from dsde.core.errors import InvalidInput

SCHEMA = 1
FILE_NAME = "results.json"


@dataclass(slots=True)
class Counts:
    """What a contender did in one round, all requests together."""

    num_target_passes: int = 0
    num_draft_passes: int | None = 0
    num_decodes: int = 0
    """times that a request was given tokens by a step, those that ended its prompt aside"""
    num_drafts: int = 0
    """of these, times that something was drafted"""
    num_draft_tokens: int | None = 0
    """None like the one above: a peer does not say"""
    num_accepted_tokens: int = 0
    drafts_by_length: list[int] = field(default_factory=list)
    """how many drafts had 1, 2, ... tokens"""
    num_host_steps: int = 0
    """on a GPU: steps that took the slower way over the host"""


@dataclass(slots=True)
class Round:
    """One pass of one contender over the requests of a cell. Lists are in the order of the requests."""

    seconds: float
    num_tokens: list[int]
    shares_s: list[float]
    """the part of `seconds` that is each request's own: those that run share the time of a step evenly"""
    first_token_s: list[float]
    """from arrival"""
    total_s: list[float]
    counts: Counts


@dataclass(slots=True)
class Difference:
    """A text that is not what `off` gave."""

    request: int
    position: int
    """of the first other token"""
    gap: float | None
    """nats between the target's own two best tokens there; None where it was not measured"""


@dataclass(slots=True)
class Findings:
    """One contender in one cell."""

    rounds: list[Round] = field(default_factory=list)
    lossless: bool = True
    """False: a rule was used that does not promise the target's own text"""
    compared: bool = True
    """whether its texts were held against those of `off`; a peer has its own random numbers"""
    differences: list[Difference] = field(default_factory=list)


@dataclass(slots=True)
class Cell:
    workload: str
    batch_size: int
    temperature: float
    kinds: list[str]
    """of every request"""
    num_prompt_tokens: list[int]
    contenders: dict[str, Findings]
    """by name, in the order of the command"""

    @property
    def key(self) -> CellKey:
        return CellKey(self.workload, self.batch_size, self.temperature)

    @property
    def name(self) -> str:
        """of the workload: of a file without its folder and ending"""
        return self.workload.rpartition("/")[2].partition(".")[0]

    @property
    def num_rounds(self) -> int:
        """rounds that every contender has finished"""
        return min((len(findings.rounds) for findings in self.contenders.values()), default=0)


@dataclass(slots=True)
class Trace:
    """What every step did for one request."""

    contender: str
    workload: str
    temperature: float
    kind: str
    prompt: str
    num_prompt_tokens: int
    pieces: list[str]
    """the text, token by token"""
    steps: list[dict[str, Any]]
    """as `StepRecord.to_dict`, with `entropies` of the draft"""


@dataclass(slots=True)
class Results:
    setting: Setting
    command: str
    machine: dict[str, str]
    models: dict[str, str]
    dsde: str
    started: str
    elapsed_s: float = 0.0
    """of all sessions together"""
    finished: bool = False
    cells: list[Cell] = field(default_factory=list)
    traces: list[Trace] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def cell(self, key: CellKey) -> Cell | None:
        return next((cell for cell in self.cells if cell.key == key), None)

    @property
    def measured(self) -> list[Cell]:
        """cells of which there is something to tell"""
        return [cell for cell in self.cells if cell.num_rounds]

    def note(self, sentence: str) -> None:
        if sentence not in self.notes:
            self.notes.append(sentence)

    def save(self, path: Path, **derived: Any) -> None:
        """Replace the file in one go, so that nobody ever finds half of it."""
        content = {"schema": SCHEMA, **asdict(self), "setting": self.setting.to_dict(), **derived}
        unfinished = path.with_suffix(".tmp")
        unfinished.write_text(json.dumps(content, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")
        unfinished.replace(path)


def load_results(path: Path) -> Results:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidInput(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise InvalidInput(f"{path} is not valid JSON: {error}") from None
    schema = content.get("schema") if isinstance(content, dict) else None
    if schema != SCHEMA:
        raise InvalidInput(f"{path} is not a result of dsde bench with schema {SCHEMA}; its schema is {schema!r}")
    try:
        known = {field.name for field in fields(Results)} - {"setting", "cells", "traces"}
        return Results(
            setting=Setting.from_dict(content["setting"]),
            cells=[_cell(values) for values in content["cells"]],
            traces=[Trace(**values) for values in content["traces"]],
            **{name: content[name] for name in known},
        )
    except (KeyError, TypeError) as error:
        raise InvalidInput(f"{path} is damaged: {error}") from None


def _cell(values: dict[str, Any]) -> Cell:
    contenders = {}
    for name, found in values["contenders"].items():
        rounds = [Round(**{**one, "counts": Counts(**one["counts"])}) for one in found["rounds"]]
        differences = [Difference(**one) for one in found["differences"]]
        contenders[name] = Findings(rounds, found["lossless"], found["compared"], differences)
    return Cell(**{**values, "contenders": contenders})
