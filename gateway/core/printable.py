"""Text for people: foreign text that is fit for a terminal, a line of a log or an error, and counts."""

from __future__ import annotations


def printable(text: str) -> str:
    """Escape control characters: a hostile name must not steer a terminal, nor begin a line."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def shown(name: str, most_chars: int = 64) -> str:
    """Return a client's own name for something, as an error may repeat it: short, and printable."""
    return "".join(char if char.isprintable() else "?" for char in name[:most_chars])


def count(number: int, noun: str) -> str:
    """Return `1 pool`, or `2 pools`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
