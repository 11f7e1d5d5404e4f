"""One token, asked of an engine through its own API: the only proof from outside that it works.

`/health` answers 200 while the engine hangs (vLLM asks the engine nothing for it). A canary is sent
where nothing else proves progress: at the end of a start, and to a backend that has long been idle.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Final

import msgspec

from gateway.core.types import Endpoint
from gateway.pools.table import Backend
from gateway.watch.fetch import FetchError, Pages

# A prompt of one token, given as an id: no chat template and no tokenizer can make it fail.
_PROMPT: Final = [1]
# In tokens: several KV blocks.
_WARM_UP_PROMPT: Final = 256
_WARM_UP_OUTPUT: Final = 8
_PATHS: Final = {
    Endpoint.COMPLETIONS: "/v1/completions",
    Endpoint.EMBEDDINGS: "/v1/embeddings",
}


async def canary(pages: Pages, backend: Backend, *, timeout_s: float) -> None:
    """Have the engine compute one token; return when it has.

    A backend without an endpoint to ask for a token (audio, say) has to answer /health. A reply of 4xx
    passes: the backend lives, and no more can be known.

    Raises:
        FetchError: it failed, or gave nothing within `timeout_s`.
    Cancel: the request is aborted.
    """
    await _ask(pages, backend, _PROMPT, 1, timeout_s)


async def warm_up(pages: Pages, backend: Backend, *, timeout_s: float) -> None:
    """Have the engine read a prompt of some length and write a few tokens, before clients do.

    Raises:
        FetchError: it failed, or gave nothing within `timeout_s`.
    """
    window = backend.window_tokens or _WARM_UP_PROMPT
    length = max(1, min(_WARM_UP_PROMPT, window - _WARM_UP_OUTPUT))
    await _ask(pages, backend, _PROMPT * length, _WARM_UP_OUTPUT, timeout_s)


async def _ask(
    pages: Pages, backend: Backend, prompt: list[int], tokens: int, timeout_s: float
) -> None:
    model = backend.base_model
    known = backend.endpoints
    endpoint = next((each for each in _PATHS if known is None or each in known), None)
    if model is None or endpoint is None:
        await pages.get("/health", timeout_s=timeout_s)
        return
    body: dict[str, object] = {"model": model}
    if endpoint is Endpoint.COMPLETIONS:
        text_or_ids = "a " * len(prompt) if backend.plain else prompt
        body |= {"prompt": text_or_ids, "max_tokens": tokens, "temperature": 0}
    else:
        body |= {"input": prompt}
    sent = msgspec.json.encode(body)
    status, _ = await pages.post(_PATHS[endpoint], sent, timeout_s=timeout_s)
    # 503 is the engine's own admission control, or a server that shuts down: other signs show which.
    if status >= HTTPStatus.INTERNAL_SERVER_ERROR and status != HTTPStatus.SERVICE_UNAVAILABLE:
        raise FetchError(f"http_{status}")
