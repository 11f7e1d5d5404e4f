"""The ids under which requests are sent to engines: fresh for every attempt, and impossible to guess.

vLLM aborts, caches and names its replies by the id it is given, so an id that two tenants can share, or
that one can choose, is a way from one to the other. A client's own id stays in our replies and logs.

vLLM begins its replies with the id (`{"id":"chatcmpl-<id>"`). One that names another attempt of this
process was meant for somebody else. A reply that names no id of ours proves nothing: other servers,
and another gateway in between, have ids of their own.
"""

from __future__ import annotations

import os
import re
from typing import Final

_PROCESS: Final = os.urandom(4).hex()  # tells our ids from those of other gateways
_OURS: Final = _PROCESS.encode()
_NAMED: Final = re.compile(rb'(?:data: )?\{"id":"[a-z]{1,24}-' + _OURS)
_NAMED_BYTES: Final = 80  # an id that is named has ended by then
_DRAWN: Final = 64  # ids drawn at a time: one system call for all of them
_drawn: list[str] = []


def engine_id() -> str:
    """Return a new id of 128 random bits."""
    if not _drawn:
        _drawn.extend(os.urandom(16 * _DRAWN).hex(" ", 16).split())
    return _PROCESS + _drawn.pop()


def plain_id() -> str:
    """Return a new id for a server that is no vLLM: a UUID, for llama-cpp-python refuses others with a bare 400."""
    return engine_id()[len(_PROCESS) :]


def is_of_another(reply: bytes, own_id: str) -> bool:
    """Whether the beginning of a reply, or of its first frame, names another attempt."""
    # `find` takes half the time of `in`, which first asks whether it is given a number.
    return (
        reply.find(own_id.encode(), 0, _NAMED_BYTES) < 0  # nobody can guess it
        and reply.find(_OURS, 0, _NAMED_BYTES) >= 0
        and _NAMED.match(reply) is not None
    )
