"""What each error code means and what to do: `python -m gateway.core.codes > deploy/ERRORS.md`.

Clients branch on codes, so a code stays what it is. A test compares this table with the codes that the source raises.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Final

_SMALLER: Final = "Send less, or have the operator raise the setting that the message names."
_CORRECT: Final = "Correct the field that `param` names."
_NEW_KEY: Final = "Ask the operator of the gateway."
_LATER: Final = "Send it again after `retry-after`; SDKs do."

# By who can do something about it, in the order of the page: the statuses of each code, what it means, what to do.
_SECTIONS: Final[Mapping[str, Mapping[str, tuple[str, str, str]]]] = {
    "The request": {
        "context_length_exceeded": (
            "400",
            "Prompt and output together do not fit the model's window. The message has all three numbers.",
            "Shorten the prompt, or ask for less output. `GET /v1/models` tells the window.",
        ),
        "invalid_json": (
            "400",
            "The body is not JSON in UTF-8.",
            "The message says at which byte.",
        ),
        "invalid_form": (
            "400",
            "An upload is not a well-formed form.",
            "The message says which part.",
        ),
        "invalid_http": (
            "400",
            "What came is not HTTP/1.1, or may be read in two ways.",
            "Look at what stands between the client and the gateway.",
        ),
        "invalid_type": ("400", "A field has the wrong type.", _CORRECT),
        "invalid_value": ("400", "A field has a value that it cannot have.", _CORRECT),
        "invalid_token_id": ("400", "A prompt of token ids has one that is none.", _CORRECT),
        "invalid_json_schema": (
            "400",
            "A schema for structured output is none, or too large.",
            _SMALLER,
        ),
        "invalid_pattern": (
            "400",
            "A pattern for structured output is invalid, or would take too long.",
            _CORRECT,
        ),
        "invalid_request": (
            "400",
            "The backend refused the request; the message is its own.",
            _CORRECT,
        ),
        "duplicate_key": ("400", "A name comes twice in one object.", "Send it once."),
        "missing_required_parameter": (
            "400",
            "A field is missing, often `model`.",
            "Add the field that `param` names.",
        ),
        "unknown_parameter": (
            "400",
            "The endpoint has no such field, and `parameters.unknown_fields` is `refuse`.",
            "Leave it out.",
        ),
        "unsupported_parameter": (
            "400",
            "A field, or its value, is not accepted here.",
            "The message says why.",
        ),
        "unsupported_media_address": (
            "400",
            "The backend may not fetch media from that address.",
            "Send the media inline, as a `data:` URL.",
        ),
        "integer_above_max_value": ("400", "A number is too large.", _SMALLER),
        "integer_below_min_value": ("400", "A number is too small.", _CORRECT),
        "decimal_above_max_value": ("400", "A number is too large.", _CORRECT),
        "decimal_below_min_value": ("400", "A number is too small.", _CORRECT),
        "array_above_max_length": ("400", "A list has too many entries.", _SMALLER),
        "string_above_max_length": ("400", "A text is too long.", _SMALLER),
        "previous_response_not_found": (
            "400",
            "Responses are not stored here, so none can be continued by its id.",
            "Send the whole conversation in `input`.",
        ),
        "thread_unsupported_request": (
            "400",
            "Conversations are not stored here, so a Messages request cannot continue a `thread`.",
            "Send the whole conversation in `messages`. The tool runners of Anthropic's SDKs do so by themselves.",
        ),
        "request_quarantined": (
            "400",
            "Two backends died with this request in them. Nobody gets it for ten minutes.",
            "Change it. Operators: `vllm-gateway quarantine`.",
        ),
        "model_not_found": (
            "404",
            "There is no such model, or the key may not use it. The words are the same for both.",
            "`GET /v1/models` lists what the key can use.",
        ),
        "endpoint_not_supported": (
            "404",
            "The model exists, but its backends do not serve this endpoint.",
            "Use another model, or another endpoint.",
        ),
        "not_found": ("404", "The backend does not know what was asked for.", _CORRECT),
        "unknown_url": (
            "404",
            "The gateway serves no such URL.",
            "The message has a hint: often `/v1` is there twice.",
        ),
        "method_not_allowed": ("405", "The URL takes another method.", "Use that of `allow`."),
        "websocket_not_served": (
            "426",
            "The URL takes POST over HTTP, and no WebSocket.",
            "Use POST.",
        ),
        "request_too_large": ("413", "The body has too many bytes.", _SMALLER),
        "request_headers_too_large": ("431", "The head has too many bytes or lines.", _SMALLER),
        "unsupported_media_type": (
            "415",
            "The body is not of the type that the endpoint takes, or is compressed.",
            "Send `content-type: application/json`, without `content-encoding`.",
        ),
    },
    "The key": {
        "missing_api_key": (
            "401",
            "No key came with the request.",
            "Send `Authorization: Bearer gw_...`, or `x-api-key`.",
        ),
        "invalid_api_key": (
            "401",
            "The key is unknown, revoked or expired. The message says since when it has not worked.",
            _NEW_KEY,
        ),
        "unknown_tier": (
            "401",
            "The key's tier is not in the settings.",
            "Operators: add it to `tiers`, or change the key.",
        ),
        "wrong_kind_of_key": (
            "403",
            "The key is for something else: `admin` and `metrics` keys use no models.",
            _NEW_KEY,
        ),
        "ip_not_authorized": ("403", "The key may not be used from this address.", _NEW_KEY),
        "origin_not_allowed": (
            "403",
            "A web page of this origin may not call the gateway.",
            "Operators: `cors.origins`.",
        ),
        "too_many_failed_keys": (
            "429",
            "The address sent too many requests without a valid key.",
            "Correct the key, then wait.",
        ),
    },
    "Limits and load": {
        "rate_limit_exceeded": (
            "429",
            "A limit of the key or its tenant is used up. The message names the rule and the numbers.",
            "Wait for `retry-after`, which is at most 30 s; the message has the whole time. Without that header the"
            " request can never fit: send less.",
        ),
        "too_many_waiting": (
            "429",
            "The key already has as much in the queue as one key may have.",
            "Send fewer requests at a time, then again after `retry-after`.",
        ),
        "too_many_body_bytes": (
            "429",
            "The key's large bodies hold too much memory.",
            "Send fewer large requests at a time.",
        ),
        "server_is_overloaded": (
            "503",
            "No backend has room now, and waiting would take too long.",
            _LATER,
        ),
        "too_many_connections": ("503", "All connections that may be open are at work.", _LATER),
    },
    "The backend, or the gateway": {
        "model_unavailable": (
            "503",
            "None of the model's backends serves now.",
            f"{_LATER} Operators: `vllm-gateway status` says why.",
        ),
        "backend_error": (
            "500, 502",
            "The backend failed. In a stream this is an error frame.",
            "Send it again. Operators: `vllm-gateway explain ID`, `events`.",
        ),
        "reply_too_large": (
            "502",
            "The reply is larger than `limits.max_reply`.",
            "Ask for less at a time, or have the operator raise the limit.",
        ),
        "backend_down": (
            "502",
            "The backend was taken out of service with the request in it.",
            "Send it again.",
        ),
        "backend_timeout": (
            "504",
            "The backend was silent for too long. It may still be at work.",
            "Operators: `vllm-gateway status`, `timeouts`.",
        ),
        "request_timeout": (
            "408, 504",
            "408: the client sent its head or body too slowly. 504: the request took longer than `timeouts.total`.",
            "Ask for less output, or have the operator raise the time-out.",
        ),
        "shutting_down": (
            "503",
            "This gateway is stopping.",
            "Send it again: another one answers, or this one soon.",
        ),
        "keys_unknown": (
            "503",
            "The keys are in Redis, which has not answered since this gateway started.",
            _LATER,
        ),
        "limits_unavailable": (
            "503",
            "A limit with `on_outage: closed` cannot be checked while Redis is away.",
            _LATER,
        ),
        "server_error": ("500", "A bug of the gateway.", "Report it with the request's id."),
    },
}
CODES: Final[frozenset[str]] = frozenset().union(*_SECTIONS.values())

_HEAD: Final = """\
# Error codes

Made from `gateway/core/codes.py`: `python -m gateway.core.codes > deploy/ERRORS.md`.

An error is `{"error": {"message", "type", "param", "code"}}`, in an event stream too. Anthropic's endpoints have
Anthropic's form, with the code in `error.details.error_code`; the message is the same. Each reply has the request's id
in `x-request-id`; with it an operator asks `vllm-gateway explain ID`. Codes that are not in this list are the backend's
own.
"""


def reference() -> str:
    """Return the page."""
    lines = [_HEAD]
    for title, codes in _SECTIONS.items():
        lines += [
            f"## {title}",
            "",
            "| code | status | what it means | what to do |",
            "|---|---|---|---|",
            *(
                f"| `{code}` | {status} | {means} | {do} |"
                for code, (status, means, do) in codes.items()
            ),
            "",
        ]
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    sys.stdout.write(reference())
