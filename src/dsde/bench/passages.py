"""One traced request as pieces of text: which token the draft gave, which the target, and which did not stand."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from dsde.bench.results import Trace


class Origin(Enum):
    ACCEPTED = "drafted, accepted"
    REJECTED = "drafted, rejected"
    OWN = "the target's own"


@dataclass(frozen=True, slots=True)
class Piece:
    text: str
    origin: Origin

    @property
    def on_one_line(self) -> str:
        """Line breaks as a sign, and nothing that would move a cursor."""
        return _printable(self.text.replace("\n", LINE_BREAK))

    @property
    def as_written(self) -> str:
        return "\n".join(_printable(line) for line in self.text.split("\n"))


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else " " if c == "\t" else "\N{REPLACEMENT CHARACTER}" for c in text)


LINE_BREAK = "\N{RETURN SYMBOL}"
UNKNOWN = "\N{WHITE SQUARE}"
"""stands for a rejected token that is not known: on a GPU drafts never leave the device"""


def passages(trace: Trace) -> list[list[Piece]]:
    """The pieces of every step, in the order in which they were made; those before the first step by themselves."""
    first = trace.steps[0]["num_tokens"] - trace.num_prompt_tokens if trace.steps else len(trace.pieces)
    parts = [[Piece(text, Origin.OWN) for text in trace.pieces[:first]]]
    for step in trace.steps:
        start = step["num_tokens"] - trace.num_prompt_tokens
        end = start + step["accepted"]
        rejected = step["rejected"]
        if rejected is None:
            rejected = [UNKNOWN] * (step["drafted"] - step["accepted"])
        parts.append(
            [
                *(Piece(text, Origin.ACCEPTED) for text in trace.pieces[start:end]),
                *(Piece(text, Origin.REJECTED) for text in rejected),
                *(Piece(text, Origin.OWN) for text in trace.pieces[end : end + 1]),
            ]
        )
    return parts


def is_complete(trace: Trace) -> bool:
    """Whether the rejected tokens are known."""
    return all(step["rejected"] is not None for step in trace.steps)
