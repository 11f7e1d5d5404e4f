"""Settings of admission: the queue of a pool, when a KV cache counts as full, latency targets."""

from __future__ import annotations

from enum import Enum

from gateway.config.units import Duration, DurationOrZero, Section, Size, Tokens, setting


class QueueConfig(Section):
    """How many requests may wait for a backend, and how long. Tenants share the queue fairly.

    What waits with a lower priority does not count: each priority may add as much as the limits say.
    """

    max_requests: int = setting(1024, "Most waiting requests; 0: requests never wait.", ge=0)
    max_tokens: Tokens = setting("4M", "Most waiting tokens (prompts plus expected outputs).")
    max_bytes: Size = setting("256MiB", "Most bytes of waiting request bodies.")
    max_wait: DurationOrZero = setting(
        "30s",
        "Longest wait before a request is refused. While as many requests come as the pool can serve, or"
        " more, the gateway shortens it.",
    )
    tenant_share: float = setting(
        0.5, "Largest share of each limit that one tenant may use (0..1].", gt=0, le=1
    )
    announce: bool = setting(
        False, "Answer waiting streams with 200 and comments that show their queue position."
    )


class KvConfig(Section):
    """When the KV cache of a backend counts as full. The gap between the two prevents flapping."""

    stop_admitting: float = setting(
        0.95,
        "A KV cache is filled up to this ratio (0..1). At or above it, a backend closes.",
        gt=0,
        le=1,
    )
    resume: float = setting(
        0.85,
        "A backend that has closed is filled up to this ratio only (0..1), until a scrape shows less.",
        ge=0,
        lt=1,
    )


class Admission(Enum):
    """Whether the gateway decides when a request may enter an engine."""

    ON = "on"
    OFF = "off"


class SloConfig(Section):
    """Latency targets; the concurrency limits adapt to them."""

    ttft: Duration = setting(
        "2.5s",
        "Time to first token of a short prompt, at the 90th percentile. If you set it, it is also about how late"
        " a first token may be while more requests come than the pool can serve.",
    )
    itl: Duration = setting("80ms", "Mean time between tokens.")
