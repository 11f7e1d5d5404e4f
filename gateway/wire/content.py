"""What messages, inputs and documents hold: text only or more, and what of it the policy limits.

Whatever vLLM reads as a list of parts is gone through here, in every shape that it takes: messages,
lists of messages, single inputs, Anthropic blocks inside blocks. What is neither text nor a part is
refused, because it cannot be checked.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Final

import msgspec
from msgspec import Raw

from gateway.core.asked import Fact, Media
from gateway.core.errors import RequestError
from gateway.core.types import Endpoint
from gateway.wire.addresses import kind_of_address
from gateway.wire.found import Found
from gateway.wire.objects import (
    begins,
    decode_or_none,
    fields_once,
    items_of,
    objects_once,
    wrong_type,
)
from gateway.wire.parameters import media_fact
from gateway.wire.schemas import tool_facts
from gateway.wire.table import TABLE

# Where endpoints have content. Source: the request models of vLLM 0.32.
CONTENT_FIELDS: Final = frozenset(
    ("messages", "system", "input", "inputs", "images", "previous_input_messages", "query", "queries")
    + ("documents", "items", "text_1", "text_2", "data_1", "data_2", "data", "audio", "videos")
)  # fmt: skip
MEDIA_LISTS: Final = frozenset({"images", "audio", "videos"})  # of addresses
# Of these endpoints only some of those fields have content.
_CARRIERS: Final[Mapping[Endpoint, frozenset[str]]] = {
    # Their `documents` are plain texts for the template.
    Endpoint.CHAT: frozenset({"messages"}),
    Endpoint.CHAT_BATCH: frozenset({"messages"}),
    Endpoint.COMPLETIONS: frozenset(),
    Endpoint.DECISIONS: MEDIA_LISTS,
}

# Parts that have no more tokens than bytes: the names of OpenAI's chats, Responses and Anthropic together.
_TEXT_PARTS: Final = frozenset(
    {
        "text",
        "refusal",
        "thinking",
        "redacted_thinking",
        "tool_use",
        "tool_result",
        "tool_reference",
        "tool_addition",
        "tool_removal",
        "input_text",
        "output_text",
        "summary_text",
        "reasoning_text",
    }
)
_TEXT_TYPES: Final = frozenset(b'"%b"' % each.encode() for each in _TEXT_PARTS)
_EMBEDS: Final = frozenset(TABLE["content.embeds"].fields)
_URLS: Final = frozenset({"image_url", "audio_url", "video_url", "file_url"})
_SPECIAL: Final = _EMBEDS | _URLS | {"uuid", "source", "file", "content", "output", "tool"}
_REFERENCE: Final = b'"item_reference"'
# Parts inside parts: a tool's result holds blocks, a document holds content.
_MAX_NESTING: Final = 8
# Up to this size, names that come twice in a message of texts are refused too. Gateway and engine read
# the same value of them, the last, so a longer list is not searched for them.
CHECKED_BYTES: Final = 2048
_QUOTE, _LIST, _OBJECT, _NULL = b'"[{n'
_TEXT: Final = msgspec.json.Decoder(str)
_TEXTS: Final = msgspec.json.Decoder(list[str])


class _Message(msgspec.Struct):
    """A message or input item: vLLM reads media of its content only."""

    content: Raw = Raw()
    output: Raw = Raw()


class _Defined(msgspec.Struct):
    """A tool that a message defines."""

    input_schema: Raw = Raw()


_DEFINED: Final = msgspec.json.Decoder(_Defined)
_MESSAGES: Final = msgspec.json.Decoder(list[_Message])


def has_content(endpoint: Endpoint, field: str) -> bool:
    """Whether a field of an endpoint holds messages, inputs or documents."""
    return field in _CARRIERS.get(endpoint, CONTENT_FIELDS)


def scan(field: str, raw: Raw, facts: Found) -> bool:
    """Go through a field's content: note what the policy limits, say whether it surely is text only.

    Raises:
        RequestError: 400; something is neither text nor a part, or a key comes twice.
    """
    first = begins(raw)
    if field == "system":  # blocks, without a message around them
        return _content(raw, field, facts, 0)
    if first == _LIST:
        if field in MEDIA_LISTS:
            _addresses(raw, field, facts)
            return False
        return _messages(field, raw, facts)
    if first == _OBJECT:
        return _message(fields_once(raw, field), field, facts)
    if first == _NULL or (first == _QUOTE and field != "messages"):
        return True
    if field == "messages":
        raise wrong_type(field, "expected a list of messages")
    raise _unclear(field)


def _messages(path: str, raw: Raw, facts: Found, depth: int = 0) -> bool:
    data = bytes(raw)
    if len(data) <= CHECKED_BYTES and data.count(b'"content"') > data.count(b"{"):
        _check_names(raw, path)
    if path == "input" and _REFERENCE in data:
        _check_references(raw, path)
    if path == "messages" and data.find(b"[", 1) < 0 and data.find(b"{") > 0:
        return True  # no list but the first, so no parts: nothing to decode
    try:
        messages = _MESSAGES.decode(raw)
    except (msgspec.DecodeError, RecursionError):
        return _mixed(path, raw, facts, depth)
    plain = True
    for index, message in enumerate(messages):
        content, output = message.content, message.output
        if len(content) and begins(content) != _QUOTE:
            plain = _content(content, f"{path}[{index}].content", facts, 0) and plain
        if len(output):
            plain = _content(output, f"{path}[{index}].output", facts, 0) and plain
    return plain


def _check_names(raw: Raw, path: str) -> None:
    with suppress(msgspec.DecodeError):
        objects_once(raw, path)


def _check_references(raw: Raw, path: str) -> None:
    for index, item in enumerate(items_of(raw)):
        if begins(item) == _OBJECT and fields_once(item, path).get("type") == Raw(_REFERENCE):
            place = f"{path}[{index}]"
            raise RequestError(
                f"`{place}` refers to a stored item: responses are not stored here. Send the item "
                "itself. (The AI SDK's OpenAI provider does so with `store: false`.)",
                param=place,
                code="unsupported_parameter",
            )


def _mixed(path: str, raw: Raw, facts: Found, depth: int) -> bool:
    """Go through a list of texts, token ids, or lists of those or of messages."""
    plain = True
    if b"{" not in bytes(raw) and path != "messages":
        return plain
    for index, item in enumerate(items_of(raw)):
        place, first = f"{path}[{index}]", begins(item)
        if first == _LIST and depth < 2:
            plain = _messages(place, item, facts, depth + 1) and plain
        elif first == _OBJECT:
            plain = _message(fields_once(item, place), place, facts) and plain
        elif path.startswith("messages"):
            raise wrong_type(place, "expected a message, an object with `role` and `content`")
        elif first not in b'"-0123456789':
            raise _unclear(place)
    return plain


def _message(message: Mapping[str, Raw], path: str, facts: Found) -> bool:
    plain = True
    for name in ("content", "output"):
        if name in message:
            plain = _content(message[name], f"{path}.{name}", facts, 0) and plain
    return plain


def _content(raw: Raw, path: str, facts: Found, depth: int) -> bool:
    """Go through the value of a content: text, a part, or a list of both."""
    first = begins(raw)
    if first in (_QUOTE, _NULL):
        return True
    if depth > _MAX_NESTING:
        raise RequestError(
            f"`{path}` is nested more than {_MAX_NESTING} deep.", param=path, code="invalid_type"
        )
    if first == _OBJECT:
        return _part(fields_once(raw, path), path, facts, depth)
    if first != _LIST:
        raise _unclear(path)
    try:
        parts = objects_once(raw, path)
    except msgspec.DecodeError:
        return _mixed_parts(raw, path, facts, depth)
    plain = True
    for index, part in enumerate(parts):
        if _SPECIAL.isdisjoint(part) and "type" not in part:
            plain = False  # neither text nor anything that is judged
        elif bytes(part.get("type", b"")) not in _TEXT_TYPES or not _SPECIAL.isdisjoint(part):
            plain = _part(part, f"{path}[{index}]", facts, depth) and plain
    return plain


def _mixed_parts(raw: Raw, path: str, facts: Found, depth: int) -> bool:
    plain = True
    for index, item in enumerate(items_of(raw)):
        place, first = f"{path}[{index}]", begins(item)
        if first == _OBJECT:
            plain = _part(fields_once(item, place), place, facts, depth) and plain
        elif first != _QUOTE:
            raise _unclear(place)
    return plain


def _part(part: Mapping[str, Raw], path: str, facts: Found, depth: int) -> bool:
    kind = _type_of(part, path)
    if kind in _EMBEDS:
        facts.note(Fact("content.embeds", 1.0, f"{path}.{kind}"))
    plain, media = kind in _TEXT_PARTS, facts.media
    for name in part.keys() & _SPECIAL:
        raw, place = part[name], f"{path}.{name}"
        if name in _EMBEDS:
            plain = False
            if kind != name:
                facts.note(Fact("content.embeds", 1.0, place))
        elif begins(raw) == _NULL:
            continue
        elif name in _URLS:
            plain = False
            _address(raw, place, facts)
        elif name == "uuid":
            facts.note(Fact("content.uuid", 1.0, place))
        elif name == "tool":
            _added_tool(raw, place, facts)
        else:
            plain = _inner(name, raw, place, facts, depth) and plain
    # Media inside it were counted, without the text beside them.
    if not plain and facts.media == media:
        facts.add_medium(part)
    return plain


def _added_tool(raw: Raw, path: str, facts: Found) -> None:
    """Note a tool that a message defines (Anthropic's `tool_addition`): the engine adds it to the others.

    Its schema counts as that of a forced tool: the choice of tools stands elsewhere.
    """
    definition = fields_once(raw, path).get("definition") if begins(raw) == _OBJECT else None
    if definition is None:
        return
    facts.add(Fact("tools", 1.0, path))
    facts.add(Fact("tools_bytes", float(len(definition)), path))
    # In a large body only the beginning of a long string is seen, with this behind it (`wire.scan`).
    schema = decode_or_none(_DEFINED, definition)
    if schema is not None and b"\\u0000" in bytes(schema.input_schema):
        place = f"{path}.definition.input_schema"
        raise RequestError(
            f"`{place}` has a string that is too long, or that holds U+0000.",
            param=place,
            code="string_above_max_length",
        )
    found = Found()
    tool_facts(definition, f"{path}.definition", found, forced=True)
    for fact in found:
        facts.note(fact)


def _inner(name: str, raw: Raw, path: str, facts: Found, depth: int) -> bool:
    """Go through what a part holds: other parts, or the source of its media."""
    first = begins(raw)
    if name in ("source", "file"):
        if first != _OBJECT:
            return first == _QUOTE  # where a search result is from; nothing is fetched
        source = fields_once(raw, path)
        for key in ("url", "file_url"):
            if key in source:
                _address(source[key], f"{path}.{key}", facts)
        if "content" in source:
            _content(source["content"], f"{path}.content", facts, depth + 1)
        return False
    if first not in (_QUOTE, _LIST, _OBJECT):
        raise _unclear(path)
    return _content(raw, path, facts, depth + 1)


def _addresses(raw: Raw, path: str, facts: Found) -> None:
    """Note which kinds of address a list has. It may hold thousands: each costs only what tells its kind."""
    try:
        addresses = _TEXTS.decode(raw)
    except (msgspec.DecodeError, RecursionError):
        raise wrong_type(path, "expected a list of addresses") from None
    facts.add_media(len(addresses), len(raw))
    kinds: list[Media] = []
    for address in dict.fromkeys(addresses):
        kind = kind_of_address(address)
        if kind not in kinds:
            kinds.append(kind)
            facts.note(media_fact(kind, f"{path}[{addresses.index(address)}]"))
            if kind is Media.ANY:
                return  # no other address needs more than that


def _address(raw: Raw, path: str, facts: Found) -> None:
    """Note what kind of address media have: a text, or an object with a `url`."""
    first = begins(raw)
    if first == _OBJECT:
        fields = fields_once(raw, path)
        if "url" in fields:
            _address_text(fields["url"], f"{path}.url", facts)
    else:
        _address_text(raw, path, facts)


def _address_text(raw: Raw, path: str, facts: Found) -> None:
    first = begins(raw)
    if first == _NULL:
        return
    if first != _QUOTE:
        raise wrong_type(path, "expected an address as text")
    inline = bytes(memoryview(raw)[:6]) == b'"data:'  # not decoded: it may have megabytes
    kind = Media.DATA if inline else kind_of_address(_TEXT.decode(raw))
    facts.note(media_fact(kind, path))


def _type_of(part: Mapping[str, Raw], path: str) -> str | None:
    raw = part.get("type")
    if raw is None or begins(raw) == _NULL:
        return None
    if begins(raw) != _QUOTE:
        raise wrong_type(f"{path}.type", "expected text")
    return _TEXT.decode(raw)


def _unclear(path: str) -> RequestError:
    return wrong_type(path, "expected text or a list of parts")
