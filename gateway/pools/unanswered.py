"""Why a backend could not be asked, in plain words: of what `watch.fetch.FetchError` tells in one word."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

_NO_ENTRY: Final = "it rejects the gateway's key; set api_key"
_OF_ANOTHER: Final = "the response is not vLLM's"
_WORDS: Final[Mapping[str, str]] = {
    "ours": "this machine has no free port, file descriptor or memory, or no such kind of address",
    "refused": "connection refused",
    "dns": "the host name cannot be resolved",
    "tls": "the TLS handshake failed; does it speak TLS (vLLM's `--ssl-certfile`)?",
    "tls_untrusted": "the authority of its certificate is not trusted here; deploy/OPERATIONS.md says how to trust it",
    "tls_expired": "its certificate has expired or is not valid yet, or this machine's clock is wrong",
    "tls_name": "its certificate is for another host name or address than the one in its URL",
    "unreachable": "cannot connect",
    "timeout": "no answer in time",
    "reset": "the connection was closed",
    "too_large": _OF_ANOTHER,
    "garbage": _OF_ANOTHER,
    "http_401": _NO_ENTRY,
    "http_403": _NO_ENTRY,
    "http_404": "there is no such path (404); does vLLM listen there?",
}
_OF_MODELS: Final = "models_"  # of a health check that read the list of models


def in_words(reason: str) -> str:
    """Return what a reason says; one that is not known as it is."""
    asked = reason.removeprefix(_OF_MODELS)
    status = asked.removeprefix("http_")
    told = _WORDS.get(asked, asked if status == asked else f"it answers with status {status}")
    return told if asked == reason else f"/v1/models: {told}"
