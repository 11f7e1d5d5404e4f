"""The beginnings of a prompt, each by a key, from the bytes of its body: without a tokenizer.

What a chat template renders first comes first. Two prompts that are written alike up to an end have
the same keys up to there. Not every byte is an end: each beginning is half longer than the one
before, from 4 KiB on a quarter, so a prompt of any length has few, and what two prompts share is known
to a fifth.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from functools import lru_cache
from secrets import randbits
from typing import Final

from xxhash import xxh3_64_intdigest as digest

from gateway.core.prefix import Holder, Prefix, Session
from gateway.core.types import Ask, Call, Endpoint
from gateway.wire.large import fields_at_hand

FIRST_BYTES: Final = 256  # about 64 tokens; less is read in no time
MOST_BYTES: Final = 4 << 20  # about a million tokens
_FINER_BYTES: Final = 4096

# What comes before the conversation in templates is hashed before it, and so is what changes that.
_BEFORE_CHAT: Final = (
    "chat_template",
    "chat_template_kwargs",
    "reasoning_effort",
    "tools",
    "documents",
)
_PARTS: Final[Mapping[Endpoint, tuple[str, ...]]] = {
    Endpoint.CHAT: (*_BEFORE_CHAT, "messages"),
    Endpoint.COMPLETIONS: ("prompt",),
    Endpoint.RESPONSES: ("reasoning", "tools", "instructions", "previous_input_messages", "input"),
    Endpoint.MESSAGES: ("tools", "system", "messages"),
}
READ: Final = frozenset(_PARTS)
# What clients write about a session in a body, the most telling first.
_SESSION_FIELDS: Final = ("prompt_cache_key", "metadata", "user")
_SAYS_NOTHING: Final = frozenset((b"", b"null", b'""', b"{}"))
# With these an engine reads a prompt that is cached, or another one than is written.
_MESSAGES, _EFFORT = b'"messages"', b'"reasoning_effort"'
_ANEW: Final = ("prompt_logprobs", "truncate_prompt_tokens", "prompt_embeds")


def _ends() -> tuple[int, ...]:
    found, end = [], float(FIRST_BYTES)
    while end <= MOST_BYTES:
        found.append(int(end))
        end *= 1.5 if end < _FINER_BYTES else 1.25
    return tuple(found)


ENDS: Final = _ends()
_SLICES: Final = tuple(slice(begin, end) for begin, end in zip((0, *ENDS), ENDS, strict=False))
# By how many there are: the ends, the longest first.
_ENDS_OF: Final = tuple(tuple(reversed(ENDS[:count])) for count in range(len(ENDS) + 1))


class Beginnings:
    """Reads the beginnings of prompts, with keys that are this process's own."""

    def __init__(self, seed: int | None = None) -> None:
        self._seed = randbits(64) if seed is None else seed

    def of(self, ask: Ask, backends: Sequence[Holder]) -> Prefix | None:
        """Return the beginnings of a request's prompt; None for one of another kind, or a short one.

        A short one that names a session has that alone.

        None too if nobody asks what the backends of its pool hold.
        """
        if not backends or backends[0].held is None:
            return None
        call = ask.call
        names = _PARTS.get(call.endpoint)
        if names is None or call.longest_ratio < 1.0:
            return None
        text = _text(call, names)
        said = ask.session or _said(call)
        size = 0 if text is None else len(text)
        if text is None or (size < FIRST_BYTES and not said):
            return None
        route, need = ask.route, ask.need
        tenant = ask.caller.tenant if route.tenants_apart else ""
        salt = written_salt(call) if call.places or call.fields else b""
        key = root = _root(self._seed, route.pool, route.adapter, tenant, call.endpoint, salt)
        count = bisect_right(ENDS, size)
        keys = []
        for part in _SLICES[:count]:
            key = digest(text[part], key)
            keys.append(key)
        keys.reverse()
        home = digest(text[_SLICES[0]]) if count else 0
        prefix = Prefix(keys, _ENDS_OF[count], size, need.prompt_tokens, need.output_tokens, home)
        if said:
            named = b"%b\0%b" % (ask.caller.tenant.encode(), said)
            prefix.session = Session(digest(named, root), ask.asked_at)
            prefix.home = home or digest(named)
        return prefix


def _text(call: Call, names: Sequence[str]) -> memoryview | None:
    """Return the parts of a prompt, one behind the other; None where they are not at hand."""
    fields, body = call.fields, call.body
    if fields is None and call.places is None:  # a short ordinary chat, or a form
        at = body.find(_MESSAGES)
        if at >= 0 and _EFFORT not in body:
            return memoryview(body)[body.find(b"[", at) :]  # what is behind them is short
        fields = fields_at_hand(call)
    if fields is not None:
        if not fields.keys().isdisjoint(_ANEW):
            return None
        found = [fields[name] for name in names if name in fields]
        if len(found) == 1:
            return memoryview(found[0])
        return memoryview(b"".join(found))
    places = call.places
    if places is None or not places.keys().isdisjoint(_ANEW):
        return None
    whole, left, parts = memoryview(call.body), MOST_BYTES, []
    for name in names:
        if name in places:
            start, end = places[name]
            parts.append(whole[start : min(end, start + left)])
            left -= len(parts[-1])
    return memoryview(b"".join(parts))


def written_salt(call: Call) -> bytes:
    """Return the client's own salt, as it is written."""
    return _written(call, "cache_salt")


def _said(call: Call) -> bytes:
    """Return what a body says about its session, as it is written; nothing where it was not taken apart."""
    if call.fields is not None or call.places is not None:
        for name in _SESSION_FIELDS:
            written = _written(call, name)
            if written not in _SAYS_NOTHING:
                return written
    return b""


def _written(call: Call, name: str) -> bytes:
    """Return a field of a body that was taken apart, as it is written."""
    if call.places is None:
        return bytes(call.fields.get(name, b"")) if call.fields is not None else b""
    start, end = call.places.get(name, (0, 0))
    return bytes(call.body[start:end])


@lru_cache(maxsize=4096)
def _root(
    seed: int, pool: str, adapter: str | None, tenant: str, endpoint: Endpoint, salt: bytes
) -> int:
    """Return what the first key is seeded by: one for each cache that is apart from others."""
    names = (pool, adapter or "", tenant, endpoint.value)
    return digest(b"\0".join((*(each.encode() for each in names), salt)), seed)
