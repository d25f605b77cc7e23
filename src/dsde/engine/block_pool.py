"""KV blocks: who holds which, and which full blocks can be shared by sequences that begin alike.

Only counts and names blocks; the tensors lie elsewhere. A block id stands for a piece of the target's cache and the
same piece of the draft's, so one budget covers both.

The prefix cache is a trie: a full block is found by the block before it and its own tokens, compared as they are and
not by hash, so a collision cannot mix two prompts. Blocks that nobody holds stay findable until they are needed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as Seq

from dsde.models.batch import BLOCK_SIZE

ROOT = 0
"""Name of the empty prefix."""


class BlockPool:
    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.draft_valid = [False] * num_blocks
        """whether the draft's half of a registered block is computed too"""
        self._holders = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict((block, None) for block in range(num_blocks))
        self._children: dict[tuple[int, tuple[int, ...]], int] = {}
        self._keys: dict[int, tuple[int, tuple[int, ...]]] = {}
        self._nodes: dict[int, int] = {}
        self._next_node = ROOT + 1

    @property
    def num_free(self) -> int:
        """blocks that nobody holds, findable ones included"""
        return len(self._free)

    def is_free(self, block: int) -> bool:
        return block in self._free

    def allocate(self, count: int) -> list[int]:
        """Take blocks that nobody holds, those that were never shared first; the caller has checked num_free."""
        blocks = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            self._forget(block)
            self._holders[block] = 1
        return blocks

    def hold(self, blocks: Seq[int]) -> None:
        """Hold blocks that were found by `match`."""
        for block in blocks:
            self._holders[block] += 1
            self._free.pop(block, None)

    def release(self, blocks: Seq[int]) -> None:
        # Last block first: the end of a prefix is worth less than its beginning, so it is taken again sooner.
        for block in reversed(blocks):
            self._holders[block] -= 1
            if self._holders[block] == 0:
                self._free[block] = None
                if block not in self._keys:
                    self._free.move_to_end(block, last=False)

    def match(self, tokens: Seq[int]) -> tuple[list[int], int]:
        """The longest known chain of full blocks that `tokens` begin with, and its name."""
        blocks: list[int] = []
        node = ROOT
        for start in range(0, len(tokens) - BLOCK_SIZE + 1, BLOCK_SIZE):
            block = self._children.get((node, tuple(tokens[start : start + BLOCK_SIZE])))
            if block is None:
                break
            blocks.append(block)
            node = self._nodes[block]
        return blocks, node

    def register(self, block: int, parent: int, tokens: Seq[int]) -> int:
        """Make a full block findable; returns its name, or that of the block that is known under it already."""
        key = (parent, tuple(tokens))
        known = self._children.setdefault(key, block)
        if known == block:
            self._keys[block] = key
            self._nodes[block] = self._next_node
            self._next_node += 1
        return self._nodes[known]

    def forget_all(self) -> None:
        """Nothing is to be found any more: the contents cannot be trusted."""
        for block in list(self._keys):
            self._forget(block)

    def _forget(self, block: int) -> None:
        self.draft_valid[block] = False
        key = self._keys.pop(block, None)
        if key is not None:
            del self._children[key]
            del self._nodes[block]
