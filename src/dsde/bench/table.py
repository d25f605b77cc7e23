"""A table as data, and as Markdown. Who prints it in another form reads the fields."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Table:
    title: str
    headings: list[str]
    """the first column holds names, all others figures"""
    rows: list[list[str]]
    note: str = ""
    marked: list[int] = field(default_factory=list)
    """rows that matter most"""

    def to_markdown(self) -> str:
        lines = [_line(self.headings), _line(["---", *["---:"] * (len(self.headings) - 1)])]
        for number, row in enumerate(self.rows):
            lines.append(_line([f"**{cell}**" if number in self.marked and cell else cell for cell in row]))
        parts = [f"### {self.title}", "\n".join(lines)]
        return "\n\n".join([*parts, self.note] if self.note else parts)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
