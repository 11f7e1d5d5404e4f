"""The request for the rest of a stream, by the token ids of its prompt and of what was said, or by text. Pure.

Completions take token ids as their prompt. For a chat they are given beside its messages, in
`kv_transfer_params`; vLLM takes them in place of the rendered messages since 0.27, without any flag. An
older one ignores them, so it gets a completion in place of that chat (`as_completion`). One that begins anew
shows that by the ids that it tells of its prompt.

The rest of a stream of Messages or Responses is asked for as a chat, too: a chat tells its token ids, so what
comes is proven. Its prompt stands in the ids, and only how to choose tokens is told beside them.

By text, a completion's prompt gets what was said behind it, and a chat an assistant's message that is to
be continued (`continue_final_message`, of vLLM and SGLang; llama.cpp's own server does it unasked).
"""

from __future__ import annotations

from typing import Final

import msgspec
from msgspec import structs

from gateway.core.types import Call, Demand, Dialect, Endpoint
from gateway.resume.rules import RECITED, stops_of, thinking_budget
from gateway.resume.seam import Reached
from gateway.wire.large import fields_at_hand
from gateway.wire.lax import number_of
from gateway.wire.objects import decode_or_none


def kept(call: Call) -> Call:
    """Return what is kept of a call for the rest of its stream: of a large body only its small fields.

    Of a message or response all of it, as the ids of its prompt have to be asked for.
    """
    if call.places is None or call.dialect in RECITED:
        return call
    fields = fields_at_hand(call)
    if call.dialect is Dialect.CHAT:  # the ids stand for it
        fields.setdefault("messages", _STAND_IN)
    return structs.replace(call, body=msgspec.json.encode(fields), fields=fields, places=None)


def rest_of(
    call: Call, demand: Demand, reached: Reached, offers: dict[str, msgspec.Raw]
) -> tuple[Call, Demand] | None:
    """Return the request for what is left of a stream that a call asked for; None: nothing is left.

    `offers` are the tools of a message or response, as a chat has them.
    """
    said, limit = reached.said_tokens, limit_of(call, demand)
    if limit is not None and limit <= said:
        return None
    body = fields_at_hand(call)
    if reached.text is not None:
        if not _extended(body, call.dialect, reached.text):
            return None
        prompt_tokens, exact = demand.prompt_tokens + said, False
    else:
        ids = [*reached.prompt, *reached.reply]
        if call.dialect in RECITED:
            call, body = _as_chat(call, body, offers)
        if call.dialect is Dialect.COMPLETIONS:
            body["prompt"] = _encoded(ids)
        else:
            body["kv_transfer_params"] = _encoded({"prompt_token_ids": ids})
        prompt_tokens, exact = len(ids), True
    least = number_of(body.get("min_tokens", _NULL))
    if least:
        body["min_tokens"] = _encoded(max(0, int(least) - said))
    return (
        structs.replace(call, body=msgspec.json.encode(body), fields=body, max_new_tokens=None),
        Demand(prompt_tokens, exact=exact, max_new_tokens=None if limit is None else limit - said),
    )


def limit_of(call: Call, demand: Demand) -> int | None:
    """Return how many tokens a stream has at most; None: its engine decides."""
    return demand.max_new_tokens if demand.max_new_tokens is not None else call.max_new_tokens


def has_messages(call: Call) -> bool:
    """Whether what was kept of a call is a chat with its messages: all of it can be asked for again."""
    messages = fields_at_hand(call).get("messages", _STAND_IN)
    return call.dialect is Dialect.CHAT and bytes(messages) != bytes(_STAND_IN)


def takes_text(call: Call) -> bool:
    """Whether the text of a reply has a place behind the prompt of its call."""
    return _extended(fields_at_hand(call), call.dialect, "")


def _as_chat(
    call: Call, body: dict[str, msgspec.Raw], offers: dict[str, msgspec.Raw]
) -> tuple[Call, dict[str, msgspec.Raw]]:
    """Return a call of Messages or Responses as one for a chat, whose prompt is to stand in token ids."""
    known = _OF_MESSAGES if call.dialect is Dialect.MESSAGES else _SAMPLING
    fields = {name: body[name] for name in known if name in body} | offers
    usage = msgspec.Raw(b'{"include_usage":true}')
    if stops := stops_of(call):
        fields["stop"] = _encoded(stops)
    if (budget := thinking_budget(call)) is not None:
        fields["thinking_token_budget"] = _encoded(budget)
    fields |= {"messages": _STAND_IN, "stream": _TRUE, "stream_options": usage}
    chat = structs.replace(
        call,
        endpoint=Endpoint.CHAT,
        dialect=Dialect.CHAT,
        max_new_field=None,
        places=None,
        wants_usage=True,
        tells_ids=True,
    )
    return chat, fields


def as_completion(call: Call, room_tokens: int) -> Call:
    """Return the rest of a chat as a completion, whose prompt is its token ids.

    Without a limit of its own a completion ends after 16 tokens, so it gets what the window has room for.
    """
    body = fields_at_hand(call)
    given = msgspec.json.decode(body["kv_transfer_params"], type=dict[str, msgspec.Raw])
    fields = {name: body[name] for name in _OF_CHATS if name in body}
    fields |= {"prompt": given["prompt_token_ids"], "max_tokens": _encoded(room_tokens)}
    return structs.replace(
        call,
        endpoint=Endpoint.COMPLETIONS,
        dialect=Dialect.COMPLETIONS,
        body=msgspec.json.encode(fields),
        fields=fields,
        max_new_field=None,
        places=None,
    )


def _extended(body: dict[str, msgspec.Raw], dialect: Dialect, said: str) -> bool:
    """Put what was said behind the prompt; False where it has no place there."""
    if dialect is Dialect.COMPLETIONS:
        prompt = msgspec.json.decode(body.get("prompt", b"null"))
        if not isinstance(prompt, str):
            return False
        body["prompt"] = _encoded(prompt + said)
        return True
    messages = decode_or_none(_LIST, body.get("messages", b"null"))
    flags = {"continue_final_message", "add_generation_prompt"}
    if messages is None or flags & body.keys():
        return False
    if said:
        body["messages"] = _encoded([*messages, {"role": "assistant", "content": said}])
        body["continue_final_message"], body["add_generation_prompt"] = _TRUE, _FALSE
    return True


_LIST: Final = msgspec.json.Decoder(list[msgspec.Raw])
_NULL: Final = msgspec.Raw(b"null")
_TRUE: Final = msgspec.Raw(b"true")
_FALSE: Final = msgspec.Raw(b"false")
# What says how tokens are chosen, and has one name and one meaning in all of vLLM's dialects.
_SAMPLING: Final[tuple[str, ...]] = (
    *("model", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "logit_bias"),
    *("ignore_eos", "stop_token_ids", "skip_special_tokens", "cache_salt", "priority"),
)
_OF_CHATS: Final = (*_SAMPLING, "stop", "min_tokens", "stream", "stream_options", "user")
# Of a message, vLLM (0.32) takes no notice of the others.
_OF_MESSAGES: Final = ("model", "temperature", "top_p", "top_k", "cache_salt")
_STAND_IN: Final = msgspec.Raw(b'[{"role":"user","content":"."}]')


def _encoded(value: object) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))
