"""The chunked transfer coding (RFC 9112 section 7.1), as far as one whole chunk can be told by sight."""

from __future__ import annotations

from typing import Final

_SIZES: Final[dict[bytes, int]] = {}  # size lines seen, and what they say
_SIZES_MOST: Final = 4096


def whole_chunk(data: bytes) -> bytes | None:
    """Return the payload when `data` is exactly one chunk; None when it is anything else.

    An engine writes one event per chunk, so nearly every read is one. Strict where `int` is not:
    the size must be written the plain way, without sign, prefix, underscore or extension.
    """
    end = data.find(b"\r\n", 0, 8)
    line = data[:end]
    size = _SIZES.get(line)
    if size is None:
        try:
            size = int(line, 16) if end > 0 else 0
        except ValueError:
            return None
        if not size or b"%x" % size != line.lower():
            return None
        if len(_SIZES) < _SIZES_MOST:
            _SIZES[line] = size
    if len(data) != end + size + 4 or not data.endswith(b"\r\n"):
        return None
    return data[end + 2 : -2]
