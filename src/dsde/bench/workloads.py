"""What is asked: prompts of our own in six kinds, mixtures of them, or somebody's file, in an order that a seed fixes.

The kinds differ in how predictable their answers are, from `extract` (copying, counting) over `code`, `math`,
`summarise` and `translate` to `chat`. `transition` asks for easy and hard passages within one answer.
"""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from dsde.bench.readers import Prompt, read_prompts
from dsde.core.errors import InvalidInput

KINDS = ("code", "chat", "math", "summarise", "translate", "extract")
TRANSITION = "transition"
NAMES = ("mixed", *KINDS, TRANSITION)
OWN_PROMPTS = Path(__file__).with_name("prompts.jsonl")


@dataclass(frozen=True, slots=True)
class Workload:
    name: str
    prompts: tuple[Prompt, ...]
    """shuffled; the first few of them cover all kinds"""

    def take(self, count: int) -> tuple[Prompt, ...]:
        """The first prompts. None is asked twice: the second time its text would be known."""
        if count > len(self.prompts):
            raise InvalidInput(f"workload {self.name} has {len(self.prompts)} prompts, which is fewer than {count}")
        return self.prompts[:count]


def load_workload(spec: str, seed: int) -> Workload:
    """`mixed` (all six kinds), one of `NAMES`, or a file that `read_prompts` knows."""
    if spec in NAMES:
        kinds = KINDS if spec == "mixed" else (spec,)
        return Workload(spec, _in_turn([prompt for prompt in _own_prompts() if prompt.kind in kinds], seed))
    path = Path(spec)
    if not path.is_file():
        raise InvalidInput(f"workload must be {', '.join(NAMES)} or a file of prompts; there is no file {spec}")
    return Workload(path.name.partition(".")[0], _in_turn(read_prompts(path), seed))


@cache
def _own_prompts() -> list[Prompt]:
    return read_prompts(OWN_PROMPTS)


def _in_turn(prompts: list[Prompt], seed: int) -> tuple[Prompt, ...]:
    """Shuffled within each kind, one of every kind after the other."""
    kinds: dict[str, list[Prompt]] = defaultdict(list)
    for prompt in prompts:
        kinds[prompt.kind].append(prompt)
    for name, group in kinds.items():
        random.Random(f"{seed} {name}").shuffle(group)
    longest = max(map(len, kinds.values()))
    return tuple(group[place] for place in range(longest) for group in kinds.values() if place < len(group))
