"""Makes foreign text fit for a terminal, or for a line of a log."""

from __future__ import annotations


def printable(text: str) -> str:
    """Escape control characters: a hostile name must not steer a terminal, nor begin a line."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)
