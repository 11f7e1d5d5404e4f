"""One request inside the simulated engine, and what the engine reports about it."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class Sequence:
    """One prompt and the reply it will get. The engine owns everything below `itl_s`."""

    id: str
    prompt: tuple[int, ...]
    output: tuple[int, ...]  # what will be emitted, one token a step
    finish: str = "stop"
    adapter: str | None = None
    salt: str = ""  # keeps its blocks apart from those of others, beside the adapter
    ttft_s: float | None = None  # not sooner than this after arrival
    itl_s: float | None = None  # not sooner than this after the token before
    arrived_at: float = 0.0
    due_at: float = 0.0
    emitted: int = 0
    computed: int = 0
    cached: int | None = None  # tokens that the prefix cache had when it was first admitted
    prefilled: bool = False  # its prompt was counted once
    blocks: list[int] = field(default_factory=list)
    hashes: list[int] = field(default_factory=list)

    @property
    def length(self) -> int:
        """Tokens known so far: the prompt and what was emitted."""
        return len(self.prompt) + self.emitted

    def tokens(self, start: int, end: int) -> tuple[int, ...]:
        """The tokens of prompt and output from `start` to before `end`."""
        split = len(self.prompt)
        if end <= split:
            return self.prompt[start:end]
        return self.prompt[start:] + self.output[max(0, start - split) : end - split]

    def hash_to(self, tokens: int, block_size: int) -> None:
        """Extend the chain of block hashes over the full blocks of the first `tokens` tokens."""
        while (len(self.hashes) + 1) * block_size <= tokens:
            start = len(self.hashes) * block_size
            parent = self.hashes[-1] if self.hashes else self._root()
            self.hashes.append(hash((parent, self.tokens(start, start + block_size))))

    def _root(self) -> int:
        """Return what the first block follows: it keeps adapters and salts apart, equal in every process."""
        return zlib.crc32(f"{self.adapter or ''}\0{self.salt}".encode())


@dataclass(frozen=True, slots=True)
class CacheUse:
    """Tokens of a prompt that the prefix cache had, and that it got from it."""

    found: int
    stored: int


@dataclass(frozen=True, slots=True)
class Emitted:
    """A token came out; `finish` is set with the last one."""

    id: str
    position: int
    token: int
    finish: str | None
    cache: CacheUse
