"""The request for the rest of a stream, by the token ids of its prompt and of what was said. Pure.

Completions take token ids as their prompt. For a chat they are given beside its messages, in
`kv_transfer_params`; vLLM from about 0.28 on takes them in place of the rendered messages, without
any flag. An older one ignores them and begins anew: the ids that it tells of its prompt show that.
"""

from __future__ import annotations

import msgspec
from msgspec import structs

from gateway.core.types import Call, Demand, Dialect
from gateway.resume.trail import Reached
from gateway.wire.large import fields_at_hand


def rest_of(call: Call, demand: Demand, reached: Reached) -> tuple[Call, Demand] | None:
    """Return the request for what is left of a stream that a call asked for; None: nothing is left."""
    said = len(reached.reply)
    limit = demand.max_new_tokens if demand.max_new_tokens is not None else call.max_new_tokens
    if limit is not None and limit <= said:
        return None
    ids = [*reached.prompt, *reached.reply]
    body = fields_at_hand(call)
    if call.dialect is Dialect.COMPLETIONS:
        body["prompt"] = _encoded(ids)
    else:
        body["kv_transfer_params"] = _encoded({"prompt_token_ids": ids})
    least = msgspec.json.decode(body.get("min_tokens", b"null"))
    if least:
        body["min_tokens"] = _encoded(max(0, least - said))
    return (
        structs.replace(call, body=msgspec.json.encode(body), fields=body, max_new_tokens=None),
        Demand(len(ids), exact=True, max_new_tokens=None if limit is None else limit - said),
    )


def _encoded(value: object) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))
