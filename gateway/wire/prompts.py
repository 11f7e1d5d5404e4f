"""The prompts of a request, measured by the shape that each endpoint's body has.

The context window is per prompt, so the longest one counts; the work is that of all of them.
"""

from __future__ import annotations

import re
from typing import Final

import msgspec
from msgspec import Raw, structs

from gateway.core.endpoints import TEMPLATED
from gateway.core.types import Endpoint
from gateway.wire.content import MEDIA_LISTS
from gateway.wire.measures import Measure
from gateway.wire.objects import begins, decode_or_none, is_given, items_if_list
from gateway.wire.peek import Peek, Prompts, measure_prompts

# Templates may pretty-print tools: up to this many times their size is added.
TOOLS_GROWTH: Final = 2

# A picture or sound is taken for as much text: about a thousand tokens, as pictures of usual sizes have.
MEDIUM_BYTES: Final = 4096

# vLLM writes JSON anew into a prompt: `1e15` becomes 1000000000000000.0, with a space after its comma.
JSON_GROWTH: Final = 4

_INPUT: Final = frozenset({Endpoint.EMBEDDINGS, Endpoint.POOLING, Endpoint.CLASSIFY})
_ONE: Final = TEMPLATED - {Endpoint.CHAT_BATCH} | {Endpoint.COUNT_TOKENS}
_UNBOUNDED: Final = Prompts(1, None)
_NOTHING: Final = Raw()
_LIST: Final = b"["[0]
# What a list begins with, told by its first brackets.
_OBJECTS: Final = re.compile(rb"\[[ \t\r\n]*+\{")
_LISTS: Final = re.compile(rb"\[[ \t\r\n]*+\[")
_LISTS_OF_OBJECTS: Final = re.compile(rb"\[[ \t\r\n]*+\[[ \t\r\n]*+\{")
_RAW_FIELDS: Final = msgspec.json.Decoder(dict[str, Raw])


def prompts_of(measure: Measure, seen: Peek, body: bytes) -> Prompts:
    """Measure the prompts of a JSON body.

    Raises:
        RequestError: 400; a wrong type.
    """
    prompts, found = _prompts(measure, seen, body), measure.found
    if measure.plain:
        return prompts
    size = len(body) - found.media_bytes + found.media * MEDIUM_BYTES
    return structs.replace(prompts, likely_bytes=int(size * prompts.longest_ratio))


def _prompts(measure: Measure, seen: Peek, body: bytes) -> Prompts:
    endpoint, fields, plain = measure.endpoint, measure.fields, measure.plain
    if endpoint is Endpoint.DECISIONS:
        return Prompts(1, decision_bytes(fields) if plain else None)
    if endpoint in _ONE:
        return _one(seen, body, plain)
    messages = fields.get("messages", _NOTHING)
    if len(messages) > 2 and begins(messages) == _LIST:
        if _LISTS.match(memoryview(messages)):
            return _several(messages, "messages", body, plain)
    elif endpoint is Endpoint.COMPLETIONS and is_given(seen.prompt):
        return measure_prompts(seen.prompt, "prompt")
    elif endpoint in _INPUT:
        return _of_input(endpoint, seen.input, body, plain)
    elif endpoint is Endpoint.EMBED:
        return _of_embed(fields, body, plain)
    return _one(seen, body, plain)


def _one(seen: Peek, body: bytes, plain: bool) -> Prompts:
    """Measure a prompt that a template writes."""
    if not plain:
        return Prompts(1, None)
    size, grows = len(body), TOOLS_GROWTH * len(seen.tools)
    return Prompts(1, size + grows, likely_bytes=size if grows else None)


def decision_bytes(fields: dict[str, Raw]) -> int:
    """Return the most bytes of text that a question has, with the state that it is about."""
    sizes = {name: len(raw) for name, raw in fields.items() if name not in MEDIA_LISTS}
    if "questions" in sizes:
        sizes["questions"] = _longest_member(fields["questions"])
    state = sizes.pop("state", 0)
    as_it_is = bytes(fields.get("state", _NOTHING)).startswith(b'"')
    return state * (1 if as_it_is else JSON_GROWTH) + sum(sizes.values()) * JSON_GROWTH


def _longest_member(raw: Raw) -> int:
    members = decode_or_none(_RAW_FIELDS, raw)
    if members is None:
        return len(raw)  # no object; the backend says so
    return max(map(len, members.values()), default=0)


def truncates(endpoint: Endpoint, seen: Peek) -> bool:
    """Whether the engine cuts a prompt that is too long, because the client or the API says so."""
    if seen.truncate_prompt_tokens is not None:
        return True
    if endpoint is Endpoint.EMBED:  # Cohere's default is to cut at the end
        return bytes(seen.truncate) != b'"NONE"'
    asked = bytes(seen.truncation) if endpoint is Endpoint.RESPONSES else b""
    return asked not in (b"", b"null", b'"disabled"')


def _of_input(endpoint: Endpoint, given: Raw, body: bytes, plain: bool) -> Prompts:
    """Measure `input`: text, token ids, one conversation or several."""
    if not is_given(given):  # a pooling plugin's `data` can be anything
        return _UNBOUNDED if endpoint is Endpoint.POOLING else Prompts(1, len(body))
    if _OBJECTS.match(memoryview(given)):
        return Prompts(1, len(body) if plain else None)
    if _LISTS_OF_OBJECTS.match(memoryview(given)):
        return _several(given, "input", body, plain)
    return measure_prompts(given, "input")


def _of_embed(fields: dict[str, Raw], body: bytes, plain: bool) -> Prompts:
    """Measure Cohere's request: exactly one of `texts`, `inputs` and `images` is given."""
    texts, inputs = fields.get("texts", _NOTHING), fields.get("inputs", _NOTHING)
    if is_given(texts):
        return measure_prompts(texts, "texts")
    if is_given(inputs):
        return _several(inputs, "inputs", body, plain)
    return _several(fields.get("images", _NOTHING), "images", body, plain=False)


def _several(given: Raw, field: str, body: bytes, plain: bool) -> Prompts:
    """Measure a list of prompts that share the rest of the body, and what a template adds."""
    sizes = [len(each) for each in items_if_list(given)] or [0]
    longest, total = max(sizes), sum(sizes)
    ratio = longest / total if total else 1.0
    text_bytes = len(body) - total + longest if plain else None
    return Prompts(len(sizes), text_bytes, None, ratio, field)
