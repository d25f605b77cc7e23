"""One completion in the making: its tokens, what of them is in the KV caches, and where they lie.

Written by several parts, each its own fields, as noted; nobody else keeps per-sequence state outside the policies.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from dsde.core.params import SamplingParams


class Status(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """Set at creation by the engine: the request, its prompt, and the stream its random numbers come from."""

    request_id: str
    index: int
    params: SamplingParams
    tokens: list[int]
    """prompt and output; the engine appends what verification emitted"""
    num_prompt_tokens: int
    max_tokens: int
    """of output; params.max_tokens, or what the context leaves"""
    stop_token_ids: frozenset[int]
    """end-of-sequence tokens and the request's own"""
    stream: int
    arrival: int

    # engine
    slot: int = -1
    """row of this sequence in tables of state, the policy's above all, from first admission to the end"""
    num_steps: int = 0
    """steps in which it decoded; keys the random numbers of drafting and acceptance"""
    first_token_at: float = 0.0
    """when its first token was emitted, on the clock of `time.perf_counter`"""

    # scheduler
    status: Status = Status.WAITING
    block_table: list[int] = field(default_factory=list)
    num_computed: int = 0
    """leading tokens whose target KV is in the cache"""
    num_registered_blocks: int = 0
    """leading full blocks that the prefix cache knows"""
    num_draft_shared_blocks: int = 0
    """leading blocks of those whose draft half it knows too"""
    prefix_node: int = 0
    """the prefix cache's name for those blocks"""

    # drafter and engine
    num_draft_computed: int = 0
    """leading tokens whose draft KV is in the cache; the drafter raises it, the engine lowers it on rejection"""
    draft_state: Any = None
    """whatever else the drafter remembers of it"""

    # verification
    penalty_state: Any = None
    surprise: float = 0.0
    """Consultant Decoding's moving average"""

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_output_tokens(self) -> int:
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def num_left(self) -> int:
        """tokens that it may still get"""
        return self.max_tokens - self.num_output_tokens

    @property
    def num_pending(self) -> int:
        """tokens the target has yet to read; 1 while decoding"""
        return len(self.tokens) - self.num_computed

    @property
    def coupled(self) -> bool:
        """Whether target and draft share their randomness, so that the text depends on the seed alone."""
        return self.params.seed is not None and not self.params.greedy
