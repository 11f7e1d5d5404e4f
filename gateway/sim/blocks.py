"""The KV cache of the simulated engine: counted blocks that are found again by their content."""

from __future__ import annotations

from collections import OrderedDict


class BlockPool:
    """KV blocks with reference counts; a freed block keeps its content until it is needed again."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.refs = [0] * count
        self._free: OrderedDict[int, None] = OrderedDict((block, None) for block in range(count))
        self._content: dict[int, int] = {}  # block -> hash
        self._by_content: dict[int, int] = {}  # hash -> block

    @property
    def free(self) -> int:
        """Blocks that nobody references."""
        return len(self._free)

    def find(self, hashes: list[int]) -> list[int]:
        """Return the blocks of the longest prefix that is still cached."""
        found = []
        for content in hashes:
            block = self._by_content.get(content)
            if block is None:
                break
            found.append(block)
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
            del self._by_content[content]
        self.refs[block] = 1
        return block

    def remember(self, block: int, content: int) -> None:
        """Let a full block be found by its content; the first block with it wins."""
        if content not in self._by_content and block not in self._content:
            self._content[block] = content
            self._by_content[content] = block

    def give_back(self, blocks: list[int]) -> None:
        """Drop references; the tail is reused first, so that shared beginnings live longest."""
        for block in reversed(blocks):
            self.refs[block] -= 1
            if self.refs[block] == 0:
                self._free[block] = None
