"""Who runs in a step, and whose KV blocks make room. First come, first served.

Decoding sequences always run. What is left of the token budget goes to prompts in chunks, in order of arrival. When
blocks run out the sequence that arrived last gives up its own and is computed again later, so the oldest always
advances and nothing can wait for ever. Knows nothing of lengths, drafts or sampling.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import takewhile

from dsde.core.sequence import Sequence, Status
from dsde.engine.block_pool import ROOT, BlockPool
from dsde.models.batch import BLOCK_SIZE


@dataclass(slots=True)
class Schedule:
    """One step's work."""

    decodes: list[Sequence] = field(default_factory=list)
    """have one token to read; may draft"""
    prefills: list[tuple[Sequence, int]] = field(default_factory=list)
    """read that many tokens of their prompt (or of what a preemption made them lose)"""
    preempted: list[Sequence] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)

    @property
    def joining(self) -> list[Sequence]:
        """Of those who read: who will have read all of it."""
        return [sequence for sequence, chunk in self.prefills if chunk == sequence.num_pending]


def blocks_for(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK_SIZE)


class Scheduler:
    def __init__(
        self,
        pool: BlockPool,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        may_share: Callable[[Sequence], bool] = lambda _: True,
    ) -> None:
        self.pool = pool
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.may_share = may_share
        """whether a sequence may take its first blocks from the prefix cache"""
        self.num_spare = 0
        """tokens beyond its own that a running sequence keeps blocks for, while there are enough"""
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []

    def add(self, sequence: Sequence) -> None:
        insort(self.waiting, sequence, key=_by_arrival)

    def schedule(self, admits: bool = True) -> Schedule:
        work = Schedule()
        self._schedule_decodes(work)
        # Never nothing: however many decode, those whose prompt is being read must come to an end of it.
        budget = max(self.max_num_batched_tokens - len(work.decodes), 1)
        for sequence in self.running:
            if budget > 0 and sequence.num_pending > 1:
                budget -= self._schedule_chunk(work, sequence, budget)
        while admits and self.waiting and budget > 0 and len(self.running) < self.max_num_seqs:
            sequence = self.waiting[0]
            if not self._admit(sequence) and not (self._trim() and self._admit(sequence)):
                break
            self.waiting.pop(0)
            insort(self.running, sequence, key=_by_arrival)
            work.admitted.append(sequence)
            budget -= self._schedule_chunk(work, sequence, budget)
        return work

    def reserve(self, sequence: Sequence, num_drafts: int) -> int:
        """Blocks for drafted tokens, as many as there are without taking any from others; returns what fits."""
        num_tokens = len(sequence.tokens)
        needed = blocks_for(num_tokens + num_drafts) - len(sequence.block_table)
        if needed <= 0:
            return num_drafts
        sequence.block_table += self.pool.allocate(min(needed, self.pool.num_free))
        return min(num_drafts, len(sequence.block_table) * BLOCK_SIZE - num_tokens)

    def settle(self, sequence: Sequence) -> None:
        """After a step: give back look-ahead that was not used, and let others share what is full."""
        self._keep(sequence, self.num_spare)
        if sequence.num_computed // BLOCK_SIZE > sequence.num_registered_blocks:
            self._register(sequence, sequence.num_computed)
        num_draft_full = sequence.num_draft_computed // BLOCK_SIZE
        if num_draft_full == sequence.num_draft_shared_blocks:
            return
        for place in range(sequence.num_draft_shared_blocks, num_draft_full):
            self.pool.draft_valid[sequence.block_table[place]] = True
        sequence.num_draft_shared_blocks = num_draft_full

    def _keep(self, sequence: Sequence, num_spare: int) -> bool:
        """Blocks for its tokens and so many more, at most; whether it had others."""
        keep = blocks_for(len(sequence.tokens) + num_spare)
        if len(sequence.block_table) <= keep:
            return False
        self.pool.release(sequence.block_table[keep:])
        del sequence.block_table[keep:]
        return True

    def _trim(self) -> bool:
        """Nobody keeps blocks to spare; whether somebody did. Only between steps."""
        return sum(self._keep(sequence, 0) for sequence in self.running) > 0

    @property
    def has_room(self) -> bool:
        """Whether somebody waits who could run, if there were memory."""
        return bool(self.waiting) and len(self.running) < self.max_num_seqs

    def restart(self) -> None:
        """Whatever runs gives up its blocks and is computed again; nothing that the cache holds is trusted."""
        while self.running:
            self._preempt(self.running.pop())
        self.pool.forget_all()

    def finish(self, sequence: Sequence) -> None:
        if sequence.status is Status.RUNNING:
            self.running.remove(sequence)
        elif sequence.status is Status.WAITING:
            self.waiting.remove(sequence)
        sequence.status = Status.FINISHED
        self._drop_blocks(sequence)

    def _schedule_decodes(self, work: Schedule) -> None:
        place = 0
        while place < len(self.running):
            sequence = self.running[place]
            num_tokens = len(sequence.tokens)
            if num_tokens - sequence.num_computed == 1:
                needed = blocks_for(num_tokens) - len(sequence.block_table)
                if needed > self.pool.num_free:
                    self._trim()
                while needed > self.pool.num_free:
                    victim = self.running.pop()
                    self._preempt(victim)
                    work.preempted.append(victim)
                    if victim is sequence:
                        return
                if self.num_spare and not self.has_room:
                    longest = sequence.num_prompt_tokens + sequence.max_tokens
                    wanted = blocks_for(min(num_tokens + self.num_spare, longest)) - len(sequence.block_table)
                    # The others must not have to wait for theirs.
                    needed = max(needed, min(wanted, self.pool.num_free - len(self.running) - 1))
                if needed > 0:
                    sequence.block_table += self.pool.allocate(needed)
                work.decodes.append(sequence)
            place += 1

    def _schedule_chunk(self, work: Schedule, sequence: Sequence, budget: int) -> int:
        chunk = min(sequence.num_pending, budget)
        work.prefills.append((sequence, chunk))
        # Sharing may begin in this very step: a layer writes all keys and values before anybody reads them.
        self._register(sequence, sequence.num_computed + chunk)
        return chunk

    def _admit(self, sequence: Sequence) -> bool:
        shared, node = self.pool.match(sequence.tokens[:-1]) if self.may_share(sequence) else ([], ROOT)
        needed = blocks_for(sequence.num_tokens) - len(shared)
        free = self.pool.num_free - sum(self.pool.is_free(block) for block in shared)
        # A block of growth for everybody who runs, or the newcomer would soon be thrown out again.
        if needed + len(self.running) > free:
            return False
        self.pool.hold(shared)
        sequence.block_table = shared + self.pool.allocate(needed)
        sequence.num_registered_blocks, sequence.prefix_node = len(shared), node
        sequence.num_computed = len(shared) * BLOCK_SIZE
        sequence.num_draft_shared_blocks = sum(1 for _ in takewhile(self.pool.draft_valid.__getitem__, shared))
        sequence.num_draft_computed = sequence.num_draft_shared_blocks * BLOCK_SIZE
        sequence.status = Status.RUNNING
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self._drop_blocks(sequence)
        sequence.num_computed = sequence.num_draft_computed = 0
        sequence.status = Status.WAITING
        self.add(sequence)

    def _drop_blocks(self, sequence: Sequence) -> None:
        self.pool.release(sequence.block_table)
        sequence.block_table = []
        sequence.num_registered_blocks = sequence.num_draft_shared_blocks = 0
        sequence.prefix_node = ROOT

    def _register(self, sequence: Sequence, num_tokens: int) -> None:
        for place in range(sequence.num_registered_blocks, num_tokens // BLOCK_SIZE):
            tokens = sequence.tokens[place * BLOCK_SIZE : (place + 1) * BLOCK_SIZE]
            sequence.prefix_node = self.pool.register(sequence.block_table[place], sequence.prefix_node, tokens)
            sequence.num_registered_blocks = place + 1


def _by_arrival(sequence: Sequence) -> int:
    return sequence.arrival
