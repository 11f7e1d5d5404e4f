"""Hash how a prompt begins, from the raw bytes of its body, without a tokenizer.

The parts of the body are hashed in the order in which chat templates render them. Two prompts whose
bytes are the same up to some end have the same hash there. The ends grow: each is half as far again as
the one before, and from 4 KiB on a quarter. So even a long prompt has few hashes.

The messages of a chat have ends of their own, and the last one too. So the next turn of a conversation is
known to share all of the last turn, and prompts that share a system message share all of it. What changes from
turn to turn and no engine reads (`wire.unread`) is left out.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from functools import lru_cache
from secrets import randbits
from typing import Final

from msgspec.structs import replace
from xxhash import xxh3_64_intdigest as digest

from gateway.core.prefix import HasPrefixIndex, Prefix, Session
from gateway.core.types import Ask, Call, Endpoint
from gateway.prefix.media import weighed
from gateway.wire.large import fields_at_hand
from gateway.wire.unread import HEAD_BYTES, without_billing, without_marks

FIRST_BYTES: Final = 256  # about 64 tokens; a shorter prompt is read at once
MOST_BYTES: Final = 4 << 20  # about a million tokens
_FINER_BYTES: Final = 4096
# Ends of messages count from here on, each at least a 32nd of the prompt so far behind the one before: so a
# prompt of many short messages has no more than some 30 of them for each time that it doubles.
_MESSAGES_BYTES: Final = 512
_APART_BYTES, _APART_SHIFT = 64, 5
_FEW_OTHERS: Final = 16  # braces that begin no message; where more come, a pattern takes less time
_NEXT_OBJECT: Final = re.compile(rb'\}, ?\{"')  # never within a string, where quotes are escaped
_SPACE: Final = b" "[0]

# Templates render these before the conversation, or by them; so they are hashed before it.
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
_OF_MESSAGES: Final = READ - {Endpoint.COMPLETIONS}
# Parts that may begin with the system prompt.
_SYSTEM: Final = frozenset(("system", "instructions", "messages", "input"))
# Fields of a body in which clients name a session, the most specific first.
_SESSION_FIELDS: Final = ("prompt_cache_key", "metadata", "user")
# As compact bodies and those of Python's json are written; up to the last message of a body that has no other list.
_MESSAGES: Final = re.compile(rb'"messages": ?(\[.*\}\])', re.DOTALL)
_SAYS_NOTHING: Final = frozenset((b"", b"null", b'""', b"{}"))
# With these an engine reads a cached prompt again, or reads another one than the body shows.
_ANEW: Final = ("prompt_logprobs", "truncate_prompt_tokens", "prompt_embeds")


def _ends() -> tuple[int, ...]:
    found, end = [], float(FIRST_BYTES)
    while end <= MOST_BYTES:
        found.append(int(end))
        end *= 1.5 if end < _FINER_BYTES else 1.25
    return tuple(found)


ENDS: Final = _ends()
_SLICES: Final = tuple(slice(begin, end) for begin, end in zip((0, *ENDS), ENDS, strict=False))
# The first N ends, the longest first, by N.
_ENDS_OF: Final = tuple(tuple(reversed(ENDS[:count])) for count in range(len(ENDS) + 1))


class PrefixHasher:
    """Hashes prompts, with a random seed of its own until it is given one that gateways share."""

    def __init__(self, seed: int | None = None) -> None:
        self.seed = randbits(64) if seed is None else seed

    def of(self, ask: Ask, backends: Sequence[HasPrefixIndex]) -> Prefix | None:
        """Return the hashes of a request's prompt.

        None if it has no prompt of its own (embeddings, several prompts), if it is short and names no
        session, or if the backends of its pool have no index. A short prompt that names a session has no
        hashes, only that session.
        """
        if not backends or backends[0].prefix_index is None:
            return None
        call = ask.call
        text, said = (_messages(call.body), b"") if call.messages_only else _read(call)
        if text is None:
            return None
        said = ask.session or said
        size = len(text)
        if size < FIRST_BYTES and not said:
            return None
        route, need = ask.route, ask.need
        tenant = ask.caller.tenant if route.tenants_apart else ""
        salt = written_salt(call) if call.places or call.fields else b""
        key = root = _root(self.seed, route.pool, route.adapter, tenant, call.endpoint, salt)
        count = bisect_right(ENDS, size)
        parts, ends = _SLICES[:count], _ENDS_OF[count]
        if size > _MESSAGES_BYTES and call.endpoint in _OF_MESSAGES:
            found = _message_ends(text)
            if len(found) == 1 and found[0] > ENDS[count - 1]:  # of one message, as many are
                parts = (*parts, slice(ENDS[count - 1], found[0]))
                ends = (found[0], *ends)
            elif found:
                all_ends = sorted({*ends, *found})
                parts = tuple(map(slice, (0, *all_ends), all_ends))
                ends = tuple(reversed(all_ends))
        view = text if size < _FINER_BYTES else memoryview(text)
        keys = [key := digest(view[part], key) for part in parts]
        keys.reverse()
        home = digest(view[_SLICES[0]]) if count else 0
        if call.text_bytes is None:
            ends, size = weighed(text, ends)
        prefix = Prefix(keys, ends, size, need.prompt_tokens, need.output_tokens, home)
        if said:
            named = b"%b\0%b" % (ask.caller.tenant.encode(), said)
            prefix.session = Session(digest(named, root), ask.asked_at)
            prefix.home = home or digest(named)
        return prefix


def _message_ends(text: bytes) -> list[int]:
    """Return where the messages of a prompt end, in order: those some way apart, and the last.

    All but the last are told by what is before them alone. So prompts that begin alike have the same ones.
    """
    ends, least, others = [], _MESSAGES_BYTES, 0
    at = text.find(b"{", least)
    while at >= 0:
        end = at - 2 if text[at - 1] == _SPACE else at - 1
        if end > least and _NEXT_OBJECT.match(text, end - 1):
            ends.append(end)
            least = end + (end >> _APART_SHIFT) + _APART_BYTES
            at = text.find(b"{", least)
        elif others < _FEW_OTHERS:
            others += 1
            at = text.find(b"{", at + 1)
        else:
            found = _NEXT_OBJECT.search(text, at)
            at = -1 if found is None else found.end() - len(b'{"')
    last = text.rfind(b"}]") + 1
    if last > _MESSAGES_BYTES:
        ends.append(last)
    return ends


def _messages(body: bytes) -> bytes:
    """Return the messages of a short chat."""
    found = _MESSAGES.search(body)
    return b"" if found is None else without_billing(found[1])


def _read(call: Call) -> tuple[bytes | None, bytes]:
    """Return the prompt of a body as it is hashed, None if it has none of its own, and its session."""
    names = _PARTS.get(call.endpoint)
    if names is None or call.longest_ratio < 1.0:
        return None, b""
    if call.fields is None and call.places is None:
        call = replace(call, fields=fields_at_hand(call))
    return _text(call, names), _said(call)


def _text(call: Call, names: Sequence[str]) -> bytes | None:
    """Return the parts of a prompt in one piece; None where they do not tell what the engine reads."""
    fields, places = call.fields, call.places or {}
    given = places if fields is None else fields
    if not given or not given.keys().isdisjoint(_ANEW):
        return None
    whole, left = memoryview(call.body), MOST_BYTES
    parts: list[bytes | memoryview] = []
    for name in names:
        if name not in given:
            continue
        if fields is not None:
            part = memoryview(fields[name])
        else:
            start, end = places[name]
            part = whole[start : min(end, start + left)]
            left -= len(part)
        parts.append(_billed(part) if name in _SYSTEM else part)
    text = b"".join(parts)
    return without_marks(text) if call.endpoint is Endpoint.MESSAGES else text


def _billed(part: memoryview) -> bytes | memoryview:
    """Return a part that may begin with the system prompt, without a line for billing."""
    head = bytes(part[:HEAD_BYTES])
    return part if without_billing(head) is head else without_billing(bytes(part))


def written_salt(call: Call) -> bytes:
    """Return the `cache_salt` of a body, as JSON."""
    return _written(call, "cache_salt")


def _said(call: Call) -> bytes:
    """Return the session that a body names, as JSON; nothing if it names none."""
    given = call.fields if call.places is None else call.places
    if not given or given.keys().isdisjoint(_SESSION_FIELDS):
        return b""
    for name in _SESSION_FIELDS:
        written = _written(call, name)
        if written not in _SAYS_NOTHING:
            return written
    return b""


def _written(call: Call, name: str) -> bytes:
    """Return a field of a body that was split into its fields, as JSON."""
    if call.places is None:
        written = None if call.fields is None else call.fields.get(name)
        return b"" if written is None else bytes(written)
    start, end = call.places.get(name, (0, 0))
    return bytes(call.body[start:end])


@lru_cache(maxsize=4096)
def _root(
    seed: int, pool: str, adapter: str | None, tenant: str, endpoint: Endpoint, salt: bytes
) -> int:
    """Return the seed of a prompt's first hash: a different one for each separate cache."""
    names = (pool, adapter or "", tenant, endpoint.value)
    return digest(b"\0".join((*(each.encode() for each in names), salt)), seed)
