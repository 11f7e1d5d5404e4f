"""The prompts of a request, measured by the shape that each endpoint's body has.

The context window is per prompt, so the longest one counts; the work is that of all of them.
"""

from __future__ import annotations

from typing import Final

import msgspec
from msgspec import Raw

from gateway.core.endpoints import PAIRED
from gateway.core.errors import RequestError
from gateway.core.types import Endpoint
from gateway.wire.frames import is_given
from gateway.wire.peek import (
    Peek,
    Prompts,
    fields_of,
    is_plain_input,
    is_plain_text,
    measure_prompts,
)

MAX_PROMPTS: Final = 1024  # Source: VLLM_MAX_COMPLETION_PROMPTS, vLLM 0.32
MAX_INPUTS: Final = 2048  # Source: OpenAI reference, embeddings `input`
MAX_CONVERSATIONS: Final = MAX_PROMPTS  # vLLM 0.32 has no limit of its own for a chat batch
TOOLS_GROWTH: Final = (
    2  # templates may pretty-print tools: up to this many times their size is added
)

_INPUT: Final = frozenset({Endpoint.EMBEDDINGS, Endpoint.POOLING, Endpoint.CLASSIFY})
_UNBOUNDED: Final = Prompts(1, None)
_RAWS: Final = msgspec.json.Decoder(list[Raw])


def prompts_of(endpoint: Endpoint, seen: Peek, body: bytes) -> Prompts:
    """Measure the prompts of a JSON body.

    Raises:
        RequestError: 400; too many prompts, a wrong type, a tensor sent as a part.
    """
    messages = seen.messages
    if messages:
        plain = is_plain_text(messages)
        if type(messages[0]) is list:
            return _several(fields_of(body)["messages"], "messages", body, plain)
        return Prompts(1, len(body) + TOOLS_GROWTH * len(seen.tools) if plain else None)
    if endpoint is Endpoint.COMPLETIONS and is_given(seen.prompt):
        return measure_prompts(seen.prompt, "prompt", at_most=MAX_PROMPTS)
    if endpoint in _INPUT:
        return _of_input(endpoint, seen.input, body)
    if endpoint is Endpoint.EMBED:
        return _of_embed(body)
    if endpoint in PAIRED:
        plain = b'"content"' not in body  # documents may be made of parts, as messages are
    else:
        plain = is_plain_input(seen.input)
    return Prompts(1, len(body) + TOOLS_GROWTH * len(seen.tools) if plain else None)


def truncates(endpoint: Endpoint, seen: Peek) -> bool:
    """Whether the engine cuts a prompt that is too long, because the client or the API says so."""
    if seen.truncate_prompt_tokens is not None:
        return True
    if endpoint is Endpoint.EMBED:  # Cohere's default is to cut at the end
        return bytes(seen.truncate) != b'"NONE"'
    asked = bytes(seen.truncation) if endpoint is Endpoint.RESPONSES else b""
    return asked not in (b"", b"null", b'"disabled"')


def _of_input(endpoint: Endpoint, given: Raw, body: bytes) -> Prompts:
    """Measure `input`: text, token ids, one conversation or several."""
    if not is_given(given):  # a pooling plugin's `data` can be anything
        return _UNBOUNDED if endpoint is Endpoint.POOLING else Prompts(1, len(body))
    start = bytes(given)[:64].replace(b" ", b"")  # a longer gap than this only loses the measure
    if start.startswith(b"[{"):
        return Prompts(1, len(body) if is_plain_input(given) else None)
    if start.startswith(b"[[{"):
        return _several(given, "input", body, all(map(is_plain_input, _items(given))))
    return measure_prompts(given, "input", at_most=MAX_INPUTS)


def _of_embed(body: bytes) -> Prompts:
    """Measure Cohere's request: exactly one of `texts`, `inputs` and `images` is given."""
    fields = fields_of(body)
    texts, inputs = fields.get("texts", Raw()), fields.get("inputs", Raw())
    if is_given(texts):
        return measure_prompts(texts, "texts", at_most=MAX_INPUTS)
    if is_given(inputs):
        return _several(inputs, "inputs", body, is_plain_input(inputs))
    return _several(fields.get("images", Raw()), "images", body, plain=False)


def _several(given: Raw, field: str, body: bytes, plain: bool) -> Prompts:
    """Measure a list of prompts that share the rest of the body, and what a template adds."""
    items = _items(given)
    if len(items) > MAX_CONVERSATIONS:
        raise RequestError(
            f"`{field}` may hold at most {MAX_CONVERSATIONS} entries, got {len(items)}.",
            param=field,
            code="array_above_max_length",
        )
    sizes = [len(each) for each in items] or [0]
    longest, total = max(sizes), sum(sizes)
    ratio = longest / total if total else 1.0
    return Prompts(len(sizes), len(body) - total + longest if plain else None, None, ratio)


def _items(given: Raw) -> list[Raw]:
    try:
        return _RAWS.decode(given)
    except (msgspec.DecodeError, RecursionError):
        return []  # no shape that an engine takes; the backend says so
