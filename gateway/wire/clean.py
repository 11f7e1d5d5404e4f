"""A backend's text made fit for a client: bounded, without addresses and paths of the inside."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

MAX_MESSAGE_CHARS: Final = 1024
# vLLM 0.32 names ten errors of a body at most, in up to 250 characters each; the rest it counts.
MAX_REFUSAL_CHARS: Final = 16 * 1024
_SHRINKS_CHARS: Final = 4096  # what is taken out of a text makes room for more of it

# What vLLM says where it read its own error as a chunk of a chat: in streams of Messages, before 0.33.
_MISREAD: Final = "validation errors for ChatCompletionStreamResponse"
_LOST: Final = "The backend failed, and the reason is lost: vLLM before 0.33 does not tell it here."

_HOST: Final = re.compile(r".*[\w-]\.(?:local|internal|svc|cluster|lan)\b(?::\d+)?")


def _without_host(run: re.Match[str]) -> str:
    """Replace the name of an internal host, up to its last label that says so, and its port."""
    found = _HOST.match(run[0])
    return run[0] if found is None else "<host>" + run[0][found.end() :]


_INTERNALS: Final[tuple[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]], ...]] = (
    (re.compile(r"\b[a-z][a-z0-9+.-]{1,15}://[^\s\"'<>)\]]+", re.IGNORECASE), "<url>"),
    (re.compile(r"(?<![\w.])(?:\d{1,3}\.){3}\d{1,3}(?::\d+)?(?![\w.])"), "<host>"),
    (
        re.compile(r"\[[0-9a-f]*:[0-9a-f:]+\](?::\d+)?|\blocalhost(?::\d+)?", re.IGNORECASE),
        "<host>",
    ),
    (re.compile(r"(?<![\w.-])[\w.-]+(?::\d+)?"), _without_host),  # each run is looked at once
    (
        re.compile(
            r"(?<![\w/.<])/(?:home|root|usr|opt|var|tmp|etc|srv|mnt|data|models?|workspace|app|proc|dev"
            r"|run|lib\w*|cache)/[^\s\"'<>,;)\]]*"
        ),
        "<path>",
    ),
)


def clean(text: str, most_chars: int = MAX_MESSAGE_CHARS) -> str:
    """Shorten a backend's text and take addresses and paths out of it, in time linear in its length.

    Where it tells nothing of what went wrong, other words stand for it.
    """
    if _MISREAD in text[:128]:
        return _LOST
    text = text[: most_chars + _SHRINKS_CHARS]
    for pattern, word in _INTERNALS:
        text = pattern.sub(word, text)
    text = text.strip()
    return text if len(text) <= most_chars else text[: most_chars - 1] + "…"
