"""vLLM's own surface: model list, routes, version, token counts, as bytes read."""

from __future__ import annotations

import re
from typing import Any, Final

import msgspec
from msgspec import Raw, structs

from gateway.core.endpoints import PAIRED
from gateway.core.types import Call, Endpoint, ServedModel
from gateway.wire.calls import ENDPOINTS
from gateway.wire.large import fields_at_hand
from gateway.wire.lax import NotReadable, lax_int
from gateway.wire.objects import begins, decode_or_none, fields_of, is_given, items_if_list
from gateway.wire.prompts import TOOLS_GROWTH, decision_bytes

# --- models, routes, version ---------------------------------------------------------------------


class _Model(msgspec.Struct):
    id: str
    parent: str | None = None
    max_model_len: int | None = None
    root: Any = None


class _Models(msgspec.Struct):
    data: list[_Model]


class _Routes(msgspec.Struct):
    paths: dict[str, dict[str, Raw]]


class _Version(msgspec.Struct):
    version: str


_NUMBERS: Final = re.compile(r"(\d{1,6})\.(\d{1,6})")
_UNRELEASED: Final = (0, 1)
_CHATS_TAKE_IDS: Final = (0, 27)


class _Tokens(msgspec.Struct):
    count: int
    max_model_len: int


_MODELS: Final = msgspec.json.Decoder(_Models)
_ROUTES: Final = msgspec.json.Decoder(_Routes)
_VERSION: Final = msgspec.json.Decoder(_Version)
_TOKENS: Final = msgspec.json.Decoder(_Tokens)


def parse_models(body: bytes) -> tuple[ServedModel, ...]:
    """Read `GET /v1/models`; empty when it cannot be read. Adapters have a parent."""
    listed = decode_or_none(_MODELS, body)
    return tuple(
        ServedModel(model.id, model.parent, _window(model), _adapter_path(model))
        for model in (listed.data if listed is not None else ())
    )


def _window(model: _Model) -> int | None:
    """Return a model's context window; None if its server tells none, or one that is not above 0."""
    window = model.max_model_len
    return window if window is not None and window > 0 else None


def _adapter_path(model: _Model) -> str | None:
    return model.root if model.parent is not None and isinstance(model.root, str) else None


def parse_openapi_endpoints(body: bytes) -> frozenset[Endpoint] | None:
    """Read from `GET /openapi.json` which of our endpoints are mounted; None when it is none."""
    routes = decode_or_none(_ROUTES, body)
    if routes is None:
        return None
    return frozenset(
        spec.endpoint
        for path, spec in ENDPOINTS.items()
        if "post" in routes.paths.get(path.decode(), {})
    )


def parse_version(body: bytes) -> str | None:
    """Read `GET /version`; None when it cannot be read."""
    found = decode_or_none(_VERSION, body)
    return found.version[:64] if found is not None else None


def chats_take_ids(version: str | None) -> bool:
    """Whether a chat of this vLLM takes token ids in place of its messages (`kv_transfer_params`): since 0.27.

    Where the version says nothing, as that of a build from source ("0.1.dev1"), it is assumed.
    """
    numbers = _NUMBERS.match(version or "")
    release = (int(numbers[1]), int(numbers[2])) if numbers else _UNRELEASED
    return release == _UNRELEASED or release >= _CHATS_TAKE_IDS


# --- exact counts by the backend -----------------------------------------------------------------

# What changes the rendered prompt: known to `POST /tokenize`, or else given to the template.
_RENDERED: Final = (
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "add_special_tokens",
    "chat_template",
    "mm_processor_kwargs",
    "media_io_kwargs",
)
_FOR_TEMPLATE: Final = ("documents", "reasoning_effort")
_OLDER: Final = b'"reasoning_content"'
_OBJECT: Final = b"{"[0]
_MOST_DEPTH: Final = 2
TEXT_FIELD: Final = {
    Endpoint.COMPLETIONS: "prompt",
    Endpoint.EMBEDDINGS: "input",
    Endpoint.EMBED: "texts",
    Endpoint.POOLING: "input",
    Endpoint.CLASSIFY: "input",
}
# Which field says to how many tokens a prompt is cut (vLLM 0.32); other endpoints ignore it.
_CUT_FIELD: Final = dict.fromkeys(
    (
        *(Endpoint.CHAT, Endpoint.CHAT_BATCH, Endpoint.COMPLETIONS, Endpoint.EMBEDDINGS),
        *(Endpoint.POOLING, Endpoint.CLASSIFY, Endpoint.RERANK, Endpoint.SCORE),
    ),
    "truncate_prompt_tokens",
) | {Endpoint.EMBED: "max_tokens"}
# Parts of which the engine reads a medium and no text.
_MEDIA: Final = frozenset(
    {
        *(b'"image_url"', b'"input_image"', b'"image"'),
        *(b'"input_audio"', b'"audio_url"', b'"video_url"', b'"computer_screenshot"'),
    }
)


def tokenize_request(call: Call, served_model: str) -> bytes | None:
    """Write the body for `POST /tokenize` that counts a call's prompt; None when it cannot.

    It counts chats of any content, and texts. Other dialects have no form there. Of several texts it
    counts the longest in bytes: one of fewer bytes may have more tokens, but that would take a
    request for each of up to 2,048.
    """
    if call.endpoint is not Endpoint.CHAT and call.endpoint not in TEXT_FIELD:
        return None
    fields = {name: raw for name, raw in fields_of(call.body).items() if is_given(raw)}
    asked: dict[str, object] = {"model": served_model}
    if call.endpoint is not Endpoint.CHAT:
        text = _longest(fields.get(TEXT_FIELD[call.endpoint], Raw()))
        if not bytes(text).startswith(b'"'):
            return None
        asked |= {"prompt": text} | _only(fields, ("add_special_tokens",))
        return msgspec.json.encode(asked)
    if "messages" not in fields:
        return None
    asked |= {"messages": _with_reasoning(fields["messages"])} | _only(fields, _RENDERED)
    kwargs = _for_template(fields)
    if kwargs:
        asked["chat_template_kwargs"] = kwargs
    return msgspec.json.encode(asked)


def _with_reasoning(messages: Raw) -> Raw:
    """Return messages with their reasoning under its newer name: `/tokenize` does not know the older one."""
    if bytes(messages).find(_OLDER) < 0:
        return messages
    renamed = []
    for each in items_if_list(messages):
        if begins(each) != _OBJECT:
            return messages
        fields = fields_of(each)
        older = fields.pop("reasoning_content", Raw())
        if is_given(older) and not is_given(fields.get("reasoning", Raw())):
            fields["reasoning"] = older
        renamed.append(fields)
    return Raw(msgspec.json.encode(renamed))


def _for_template(fields: dict[str, Raw]) -> dict[str, Raw]:
    """Return the template's variables of a chat; an effort of reasoning switches thinking on or off, too."""
    given, own = fields_of(fields.get("chat_template_kwargs", b"{}")), _only(fields, _FOR_TEMPLATE)
    effort = own.get("reasoning_effort")
    if effort is None:
        return given | own
    thinks = Raw(b"false" if bytes(effort) == b'"none"' else b"true")
    return {"enable_thinking": thinks} | given | own


def longest_chat(call: Call) -> Call:
    """Return the chat of a batch whose conversation has the most bytes."""
    fields = fields_of(call.body)
    fields["messages"] = _longest(fields.get("messages", Raw()))
    body = msgspec.json.encode(fields)
    return structs.replace(call, endpoint=Endpoint.CHAT, body=body, fields=fields, places=None)


def _longest(raw: Raw) -> Raw:
    """Return the longest element of a list in bytes, or the value itself when it is no list."""
    return max(items_if_list(raw), key=len, default=raw)


def _only(fields: dict[str, Raw], names: tuple[str, ...]) -> dict[str, Raw]:
    return {name: fields[name] for name in names if name in fields}


def parse_tokenize(body: bytes) -> tuple[int, int] | None:
    """Read the answer of `POST /tokenize`: prompt tokens, and the backend's window."""
    found = decode_or_none(_TOKENS, body)
    return (found.count, found.max_model_len) if found is not None and found.count >= 0 else None


# --- what can be said without a count ------------------------------------------------------------


def cut_tokens(call: Call) -> int | None:
    """Return to how many tokens the engine cuts a longer prompt; None when no number says so.

    A cut to the engine's own window (-1) is none: it is not known here. Media are not cut.
    """
    measured = call.text_bytes is not None or call.prompt_token_ids is not None
    field = _CUT_FIELD.get(call.endpoint)
    if field is None or not measured:
        return None
    asked = fields_at_hand(call).get(field, Raw())
    try:
        tokens = lax_int(msgspec.json.decode(asked)) if is_given(asked) else 0
    except NotReadable:
        return None
    return tokens if tokens > 0 else None


def prompt_bytes(call: Call) -> int:
    """Return the bytes that the text of one prompt has at most; media beside it are left out.

    It takes the body apart: for a prompt that nobody could count.
    """
    paired = call.endpoint in PAIRED
    if call.text_bytes is not None and not paired:
        return call.text_bytes
    fields = fields_of(call.body)
    if call.endpoint is Endpoint.DECISIONS:
        return decision_bytes(fields)
    if paired:  # each document or text is read beside one of the other field
        return sum(len(_longest(raw)) for raw in fields.values())
    if call.endpoint is Endpoint.EMBED:
        longest = _longest(fields.get("inputs", Raw()))
        return len(longest) - (_media_bytes(longest) if is_given(longest) else 0)
    if call.endpoint is Endpoint.CHAT_BATCH:
        return prompt_bytes(longest_chat(call))
    messages = items_if_list(fields.get("messages", fields.get("input", Raw())))
    media = sum(_media_bytes(each) for each in messages if bytes(each).startswith(b"{"))
    return len(call.body) + TOOLS_GROWTH * len(fields.get("tools", b"")) - media


def _media_bytes(message: Raw, depth: int = 0) -> int:
    """Return the bytes of the media in a message, or an item; those that a tool gave stand one level deeper."""
    fields = fields_of(message)
    size = 0
    for name in ("content", "output"):
        given = fields.get(name, Raw())
        parts = [given] if bytes(memoryview(given)[:1]) == b"{" else items_if_list(given)
        for part in parts:
            if begins(part) != _OBJECT:
                continue
            if bytes(fields_of(part).get("type", b"")) in _MEDIA:
                size += len(part)
            elif depth < _MOST_DEPTH:
                size += _media_bytes(part, depth + 1)
    return size
