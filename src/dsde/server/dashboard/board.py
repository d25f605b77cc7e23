"""What the dashboard shows: a row for every request that is watched, built from the engine's steps.

`arrivals` copies what is needed on the engine's thread; the `Board` turns it into JSON elsewhere. Neither knows of HTTP
or of who is looking. All of it is bounded: so many rows, so much of each row's text and steps; who has no row waits.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from dsde.core.outputs import StepRecord, StreamChunk
from dsde.core.params import Speculation
from dsde.engine.engine import Engine, StepOutput
from dsde.models.tokenizer import Tokenizer
from dsde.server.dashboard.words import explain

MOST_ROWS = 16
MOST_PIECES = 800
"""of a row's text; about one a token"""
MOST_POINTS = 60
"""steps that a row's curves show"""
MOST_BARS = 64
MISSING_S = 1.0
"""after which a request that the engine does not know any more has left"""
MOST_PROMPT_TOKENS = 96
"""the end of a prompt that is looked at for a title"""
MOST_TITLE = 160

Key = tuple[str, int]
"""request and completion"""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A sequence when it is first seen."""

    prompt_token_ids: list[int]
    earlier_token_ids: list[int]
    """its output from before anybody looked"""
    num_earlier: int
    speculation: Speculation
    max_tokens: int


def arrivals(engine: Engine, output: StepOutput, board: Board) -> dict[Key, Arrival]:
    """Sequences that the board does not have and has room for. To be called by the engine's thread."""
    found: dict[Key, Arrival] = {}
    num_free = board.num_free
    for chunk in output.chunks:
        if len(found) == num_free:
            break
        key = (chunk.request_id, chunk.index)
        request = None if board.has(key) else engine.requests.get(chunk.request_id)
        if request is None:
            continue
        sequence = request.completions[chunk.index].sequence
        earlier = sequence.tokens[sequence.num_prompt_tokens : len(sequence.tokens) - len(chunk.token_ids)]
        found[key] = Arrival(
            request.prompt_token_ids[-MOST_PROMPT_TOKENS:],
            earlier[-MOST_PIECES:],
            len(earlier),
            sequence.params.speculation,
            sequence.max_tokens,
        )
    return found


@dataclass(slots=True, eq=False)
class _Row:
    """One sequence. What is `fresh` has not been in a frame yet."""

    key: Key
    title: str
    arrival: Arrival
    texts: Any
    """the tokenizer's stream"""
    num_tokens: int
    pieces: deque[tuple[str, str | int]] = field(default_factory=lambda: deque(maxlen=MOST_PIECES))
    points: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=MOST_POINTS))
    seconds: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=20))
    why: str = ""
    ended: str | None = None
    missing_since_s: float | None = None
    fresh_pieces: list[tuple[str, str | int]] = field(default_factory=list)
    fresh_points: list[dict[str, Any]] = field(default_factory=list)
    is_new: bool = True
    has_changed: bool = True

    def whole(self) -> dict[str, Any]:
        head = {"prompt": self.title, "speculation": self.arrival.speculation, "max_tokens": self.arrival.max_tokens}
        return {**self._now(), **head, "pieces": list(self.pieces), "points": list(self.points)}

    def news(self) -> dict[str, Any]:
        """What has changed since the last time this was asked."""
        if self.is_new:
            news = self.whole()
        else:
            news = {**self._now(), "pieces": self.fresh_pieces, "points": self.fresh_points}
        self.fresh_pieces, self.fresh_points, self.is_new, self.has_changed = [], [], False, False
        return news

    def _now(self) -> dict[str, Any]:
        num_emitted, seconds = sum(n for n, _ in self.seconds), sum(s for _, s in self.seconds)
        return {
            "id": "/".join(map(str, self.key)),
            "num_tokens": self.num_tokens,
            "rate": _number(num_emitted / seconds) if seconds else None,
            "why": self.why,
            "ended": self.ended,
        }

    def add_piece(self, kind: str, content: str | int) -> None:
        self.pieces.append((kind, content))
        self.fresh_pieces.append((kind, content))

    def add_point(self, record: StepRecord) -> None:
        signals = {name: _number(value) for name, value in record.signals.items()}
        point = {
            "step": record.step,
            "drafted": record.drafted,
            "accepted": record.accepted,
            "predicted": _number(record.predicted),
            "cap": _number(record.cap),
            "signals": signals,
        }
        self.points.append(point)
        self.fresh_points.append(point)
        self.seconds.append((record.accepted + 1, record.step_s))


class Board:
    """Rows, the batch and the throughput. Changed by one thread; the engine's may ask what it has."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._rows: dict[Key, _Row] = {}
        self._removed: list[str] = []
        self._batch: dict[str, Any] = {"bars": [], "cap": None, "num_decoding": 0}
        self._throughput: tuple[float, float] | None = None

    def has(self, key: Key) -> bool:
        row = self._rows.get(key)
        return row is not None and row.ended is None

    @property
    def num_free(self) -> int:
        """Rows that could be taken: those that have ended make room."""
        return MOST_ROWS - sum(row.ended is None for row in list(self._rows.values()))

    def take(self, output: StepOutput, arrived: dict[Key, Arrival], throughput: tuple[float, float] | None) -> None:
        """Show one more step."""
        for key, arrival in arrived.items():
            if not self.has(key):  # it may have been seen again before this was known
                self._open(key, arrival)
        records = {(record.request_id, record.index): record for record in output.records}
        for chunk in output.chunks:
            key = (chunk.request_id, chunk.index)
            if (row := self._rows.get(key)) is not None and row.ended is None:
                self._extend(row, chunk, records.get(key))
        if output.records:
            bars = [(r.drafted, r.accepted, _number(r.predicted)) for r in output.records[:MOST_BARS]]
            cap = next((r.cap for r in output.records if r.cap is not None), None)
            self._batch = {"bars": bars, "cap": _number(cap), "num_decoding": output.records[0].num_decoding}
        self._throughput = throughput

    def end_missing(self, running: dict[str, Any], now_s: float) -> None:
        """Rows of requests that have left without a last word. One that has just finished is missing for a moment
        before its last step is shown, so they are given some time."""
        for row in self._rows.values():
            if row.ended is not None or row.key[0] in running:
                row.missing_since_s = None
            elif row.missing_since_s is None:
                row.missing_since_s = now_s
            elif now_s - row.missing_since_s >= MISSING_S:
                row.ended, row.has_changed = "abort", True

    def frame(self) -> dict[str, Any]:
        """What has changed since the last frame."""
        rows = [row.news() for row in self._rows.values() if row.has_changed]
        removed, self._removed = self._removed, []
        return {"whole": False, "rows": rows, "removed": removed, **self._shared()}

    def whole(self) -> dict[str, Any]:
        """Everything, for somebody who has nothing yet; to be asked right after a frame."""
        return {"whole": True, "rows": [row.whole() for row in self._rows.values()], "removed": [], **self._shared()}

    def _shared(self) -> dict[str, Any]:
        throughput = self._throughput and dict(zip(("with", "without"), map(_number, self._throughput), strict=True))
        return {"batch": self._batch, "throughput": throughput}

    def _open(self, key: Key, arrival: Arrival) -> None:
        if (old := self._rows.pop(key, None)) is None and len(self._rows) >= MOST_ROWS:
            old = next((row for row in self._rows.values() if row.ended is not None), None)
            if old is None:
                return
            del self._rows[old.key]
        if old is not None:
            self._removed.append("/".join(map(str, old.key)))
        texts = self._tokenizer.stream() if self._tokenizer else None
        row = _Row(key, self._title(arrival.prompt_token_ids), arrival, texts, arrival.num_earlier)
        if arrival.earlier_token_ids:
            row.add_piece("earlier", "".join(self._text(row, token) for token in arrival.earlier_token_ids))
        self._rows[key] = row

    def _extend(self, row: _Row, chunk: StreamChunk, record: StepRecord | None) -> None:
        """The draft's tokens that stood, those that did not, then the target's own."""
        num_accepted = 0 if record is None else min(record.accepted, len(chunk.token_ids))
        for token in chunk.token_ids[:num_accepted]:
            row.add_piece("accepted", self._text(row, token))
        if record is not None and record.drafted > record.accepted:
            self._add_rejected(row, record)
        for token in chunk.token_ids[num_accepted:]:
            row.add_piece("own", self._text(row, token))
        if record is not None:
            row.add_point(record)
            row.why = explain(record, row.arrival.speculation)
        row.num_tokens += len(chunk.token_ids)
        row.ended, row.has_changed = chunk.finish_reason, True

    def _add_rejected(self, row: _Row, record: StepRecord) -> None:
        if record.rejected_token_ids is None:
            row.add_piece("num_rejected", record.drafted - record.accepted)
            return
        for token in record.rejected_token_ids:
            row.add_piece("rejected", f"{token} " if self._tokenizer is None else self._tokenizer.token_text(token))

    def _text(self, row: _Row, token: int) -> str:
        return f"{token} " if row.texts is None else row.texts.push(token)

    def _title(self, prompt: list[int]) -> str:
        """What a person wrote: of the runs between special tokens the last but one, since a chat ends with the name
        of who is to answer; all of it where there is one run only."""
        if self._tokenizer is None:
            return ""
        runs, run = [], list[int]()
        for token in [*prompt, None]:
            if token is not None and self._tokenizer.decode([token]):
                run.append(token)
            elif run:
                runs.append(self._tokenizer.decode(run).strip().removeprefix("user\n"))
                run = []
        runs = [text for text in runs if text]
        title = " ".join((runs[-2] if len(runs) > 1 else "".join(runs)).split())
        return title if len(title) <= MOST_TITLE else "…" + title[-MOST_TITLE:]


def _number(value: float | None) -> float | None:
    """Four digits, and only what JSON knows."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.4g}")
