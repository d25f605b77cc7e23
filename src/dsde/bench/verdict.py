"""Whether all texts are those of `off`, and what follows if not."""

from __future__ import annotations

from dataclasses import dataclass

from dsde.bench.results import Cell, Difference, Results
from dsde.bench.tables import label

EXACT = "float32"
"""the type in which the same text is promised; in others a near tie may fall either way"""


@dataclass(frozen=True, slots=True)
class Verdict:
    good: bool
    """False: a policy that promises the target's own text did not give it"""
    sentence: str


def judge(results: Results) -> Verdict:
    compared, sampled, greedy = 0, 0, []
    for cell in results.measured:
        for name, findings in cell.contenders.items():
            if name not in results.setting.policies or not findings.lossless:
                continue
            compared += len(cell.kinds)
            if cell.temperature > 0:
                sampled += len(findings.differences)
            else:
                greedy += [(cell, name, difference) for difference in findings.differences]
    if not greedy and not sampled:
        return Verdict(True, f"Lossless: all {compared} texts of our policies are those of off.")
    said = []
    if greedy:
        said.append(f"{len(greedy)} greedy texts differ from those of off{_gaps(greedy)}")
    if sampled:
        said.append(f"{sampled} sampled texts differ from those of off with the same seeds")
    dtype = results.models["dtype"]
    if greedy and dtype == EXACT:
        cell, name, first = greedy[0]
        where = f"{name}, {label(cell)}, request {first.request + 1}, token {first.position + 1}"
        return Verdict(False, f"NOT LOSSLESS: of {compared} texts {'; '.join(said)}; the first: {where}.")
    ties = f": near ties, as are to be expected in {dtype}" if dtype != EXACT else ""
    return Verdict(True, f"Of {compared} texts {'; '.join(said)}{ties}.")


def _gaps(greedy: list[tuple[Cell, str, Difference]]) -> str:
    gaps = [difference.gap for _, _, difference in greedy if difference.gap is not None]
    return f" (where the target's two best tokens were at most {max(gaps):.2g} nats apart)" if gaps else ""
