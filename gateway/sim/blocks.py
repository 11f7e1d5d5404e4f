"""The KV cache of the simulated engine: counted blocks that are found again by their content.

As in vLLM, several blocks may hold the same content, a free block keeps its content until it is taken,
and the block that was unused longest is taken first; one without content goes before all of them.
Source: vLLM 0.32 v1/core/block_pool.py.
"""

from __future__ import annotations

from collections import OrderedDict


class BlockPool:
    """KV blocks with reference counts; a freed block keeps its content until it is needed again."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.refs = [0] * count
        self._free: OrderedDict[int, None] = OrderedDict((block, None) for block in range(count))
        self._content: dict[int, int] = {}  # block -> hash
        self._by_content: dict[int, dict[int, None]] = {}  # hash -> blocks, oldest first

    @property
    def free(self) -> int:
        """Blocks that nobody references."""
        return len(self._free)

    def __contains__(self, content: int) -> bool:
        return content in self._by_content

    def find(self, hashes: list[int]) -> list[int]:
        """Return the blocks of the longest prefix that is still cached."""
        found = []
        for content in hashes:
            blocks = self._by_content.get(content)
            if blocks is None:
                break
            found.append(next(iter(blocks)))
        return found

    def share(self, blocks: list[int]) -> None:
        """Take references on blocks that are cached."""
        for block in blocks:
            self._free.pop(block, None)
            self.refs[block] += 1

    def take(self) -> int:
        """Take the free block that was unused longest, forgetting its content."""
        block, _ = self._free.popitem(last=False)
        content = self._content.pop(block, None)
        if content is not None:
            blocks = self._by_content[content]
            del blocks[block]
            if not blocks:
                del self._by_content[content]
        self.refs[block] = 1
        return block

    def remember(self, block: int, content: int) -> None:
        """Let a full block be found by its content."""
        if block not in self._content:
            self._content[block] = content
            self._by_content.setdefault(content, {})[block] = None

    def give_back(self, blocks: list[int]) -> None:
        """Drop references; the tail is reused first, so that shared beginnings live longest."""
        for block in reversed(blocks):
            self.refs[block] -= 1
            if self.refs[block] == 0:
                self._free[block] = None
                if block not in self._content:
                    self._free.move_to_end(block, last=False)

    def forget(self) -> bool:
        """Forget the content of all blocks; False, and nothing happens, while one is referenced."""
        if self.free < self.count:
            return False
        self._content.clear()
        self._by_content.clear()
        return True
