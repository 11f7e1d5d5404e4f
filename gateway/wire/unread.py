"""What clients write into a prompt and no engine reads, though it changes from turn to turn. Pure.

Claude Code begins its system prompt with a line for the billing of Anthropic, which has another hash in each request;
what translates its requests to chats or responses keeps it. vLLM drops the line (0.32, `anthropic/serving.py` and
`renderers/chat_utils.py`). In Messages, marks of the prefix cache move on with the conversation.
"""

from __future__ import annotations

import re
from typing import Final

BILLING_LINE: Final = "x-anthropic-billing-header"
_BILLING: Final = BILLING_LINE.encode()
# Of the form of a first message, which may have a list of parts, and the line's name.
HEAD_BYTES: Final = 128
_LINE: Final = re.compile(rb'(?<=")x-anthropic-billing-header[^"\\]*+(?:\\n)*+')
_MARK: Final = re.compile(rb'"cache_control": ?\{[^{}]*+\}(?P<comma>, ?)?')
_NAME: Final = b'"cache_control"'
_MOST_MARKS: Final = 8  # the API takes four


def without_billing(written: bytes) -> bytes:
    """Return a system prompt, or messages that begin with one, as JSON and without the line for billing.

    Without that line in its first `HEAD_BYTES`, the same object is returned.
    """
    if written.find(_BILLING, 0, HEAD_BYTES) < 0:
        return written
    return _LINE.sub(b"", written, count=1)


def without_marks(written: bytes) -> bytes:
    """Return the JSON of a Messages request without the first few marks of the prefix cache."""
    at = written.find(_NAME)
    if at < 0:
        return written
    kept, begin = [], 0
    for _ in range(_MOST_MARKS):
        mark = _MARK.match(written, at)
        if mark is not None:
            end, before = mark.end(), written[max(begin, at - 2) : at]
            if before.endswith((b",", b", ")):  # then what follows keeps its own comma
                at -= 1 if before.endswith(b",") else 2
                end = mark.end() if mark["comma"] is None else mark.start("comma")
            kept.append(written[begin:at])
            begin = end
        at = written.find(_NAME, max(begin, at + 1))
        if at < 0:
            break
    return b"".join((*kept, written[begin:]))
