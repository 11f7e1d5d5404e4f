"""The rank and size of adapters whose files are on this machine."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec


@dataclass(frozen=True, slots=True)
class Size:
    """The rank of an adapter, and the bytes of its weights; None: not known."""

    rank: int | None
    bytes: int | None


class _PeftConfig(msgspec.Struct):
    r: int | None = None


def sizes(paths: Iterable[str]) -> dict[str, Size]:
    """Return the size of each adapter whose folder is on this machine. Blocks: it reads files."""
    found = {}
    for path in paths:
        folder = Path(path)
        try:
            config = msgspec.json.decode(
                (folder / "adapter_config.json").read_bytes(), type=_PeftConfig
            )
            weights = folder / "adapter_model.safetensors"
            found[path] = Size(config.r, weights.stat().st_size if weights.exists() else None)
        except (OSError, ValueError, RecursionError, msgspec.DecodeError):
            continue
    return found
