"""Text for people: foreign text that is fit for a terminal or a line of a log, and counts."""

from __future__ import annotations


def printable(text: str) -> str:
    """Escape control characters: a hostile name must not steer a terminal, nor begin a line."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def count(number: int, noun: str) -> str:
    """Return `1 pool`, or `2 pools`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
