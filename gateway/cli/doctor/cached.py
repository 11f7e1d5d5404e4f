"""Whether a backend's replies tell what its prefix cache had of a prompt: tried with one prompt, sent twice."""

from __future__ import annotations

from collections.abc import Iterator
from http import HTTPStatus
from typing import Final

import msgspec

from gateway.cli.doctor.findings import Finding, ok
from gateway.watch.fetch import FetchError, Pages
from gateway.wire.metricspage import parse_metrics
from gateway.wire.vllm import parse_models

_PROMPT_TOKENS: Final = 512  # several blocks of the largest usual size, 128
_TIMEOUT_S: Final = 10.0


class _Usage(msgspec.Struct):
    prompt_tokens_details: dict[str, object] | None = None


class _Reply(msgspec.Struct):
    usage: _Usage


async def cache_findings(backend: str, pages: Pages) -> list[Finding]:
    """Ask for one token twice, with the same prompt; return what the second reply and the metrics tell.

    Nothing where it cannot be tried: no completions, a short window, no prefix cache, or no reply in time.
    """
    try:
        models = parse_models(await pages.get("/v1/models", timeout_s=_TIMEOUT_S))
        base = next((each for each in models if each.parent is None), None)
        if base is None or (base.window_tokens or _PROMPT_TOKENS + 1) <= _PROMPT_TOKENS:
            return []
        order = {"model": base.name, "prompt": [1] * _PROMPT_TOKENS, "max_tokens": 1}
        sent = msgspec.json.encode(order)
        await pages.post("/v1/completions", sent, timeout_s=_TIMEOUT_S)
        before = await pages.get("/metrics", timeout_s=_TIMEOUT_S)
        status, reply = await pages.post("/v1/completions", sent, timeout_s=_TIMEOUT_S)
        after = await pages.get("/metrics", timeout_s=_TIMEOUT_S)
    except FetchError:
        return []
    return [] if status != HTTPStatus.OK else [*judged(backend, reply, _hits(before), _hits(after))]


def judged(backend: str, reply: bytes, before: float, after: float) -> Iterator[Finding]:
    """Yield what a reply says of its cached tokens; `before`, `after`: all that were, by the metrics. Pure."""
    try:
        usage = msgspec.json.decode(reply, type=_Reply).usage
    except msgspec.DecodeError:
        return
    if usage.prompt_tokens_details is not None:
        yield ok(
            "prompt_tokens_details", f"{backend} tells how many tokens of a prompt were cached"
        )
    elif after > before:
        yield Finding(
            verdict="note", about="prompt_tokens_details",
            told=f"{backend} does not tell how many prompt tokens were cached, so usage and routing only guess:"
            f" its metrics say {after - before:.0f}, its reply says nothing",
            change="start it with --enable-prompt-tokens-details",
        )  # fmt: skip


def _hits(page: bytes) -> float:
    sample = parse_metrics(page, 0.0)
    return 0.0 if sample is None else sample.prefix_hits or 0.0
