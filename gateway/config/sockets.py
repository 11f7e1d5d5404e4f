"""Check the paths of UNIX sockets, before anything tries to use one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from pydantic_core import PydanticCustomError

PREFIX: Final = "unix:"
# sun_path holds 108 bytes with the zero at its end: unix(7), Linux.
MOST_BYTES: Final = 107


def check_socket(path: Path) -> Path:
    """Return the path, made absolute; refuse one that no socket can have."""
    path = Path("/", *path.absolute().parts[1:])  # `//run` is /run, too
    if not str(path).isprintable():
        raise PydanticCustomError("bad_socket", "the socket path contains control characters")
    if (size := len(os.fsencode(path))) > MOST_BYTES:
        raise PydanticCustomError(
            "bad_socket",
            "the socket path {path} has {size} bytes; the system allows at most {most}",
            {"path": str(path), "size": size, "most": MOST_BYTES},
        )
    return path


def check_socket_text(value: object) -> object:
    """Refuse an empty text, or a URL, in the place of a path."""
    if isinstance(value, str) and not value.strip():
        raise PydanticCustomError("bad_socket", "the socket path is empty")
    if isinstance(value, str) and value.strip().startswith(PREFIX):
        raise PydanticCustomError("bad_socket", "write only the path, without unix:")
    return value


def socket_of(url: str) -> Path:
    """Return the path of `unix:/path`."""
    path = Path(url.removeprefix(PREFIX))
    if not path.is_absolute():
        raise PydanticCustomError(
            "bad_socket", "write the full path of the socket, like unix:/run/vllm/b1.sock"
        )
    return check_socket(path)
