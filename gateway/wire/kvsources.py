"""Where an engine publishes its KV events: what vLLM tells of it, as addresses to connect to. No I/O.

Source: vLLM 0.32 `config/kv_events.py` (the fields and their defaults), `distributed/kv_events.py`
(a rank adds its number to the port), and `GET /kv_event_sources`, which tells the endpoints of each
data-parallel rank as they are in force.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec

DEFAULT_ENDPOINT: Final = "tcp://*:5557"
MOST_RANKS: Final = 256

_TCP: Final = re.compile(r"tcp://(\*|\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+):([1-9][0-9]{0,4})")
_IPC: Final = re.compile(r"ipc://(/[\w./@-]{1,100})")
_EVERYWHERE: Final = frozenset({"*", "0.0.0.0", "[::]"})


@dataclass(frozen=True, slots=True)
class Source:
    """The addresses of one engine: its events, and what it repeats of them (None: nothing)."""

    events: str
    replay: str | None = None


def parse_sources(page: bytes, host: str | None) -> dict[int, Source] | None:
    """Return the sources by rank that `GET /kv_event_sources` tells; None for what is no such page.

    `host` is the server's; None for one on this machine.
    """
    try:
        configs = msgspec.json.decode(page, type=dict[int, dict[str, Any]])
    except (msgspec.MsgspecError, RecursionError):
        return None
    found = {rank: source_of(config, host) for rank, config in configs.items() if rank >= 0}
    ranks = sorted(rank for rank, source in found.items() if source is not None)
    return {rank: source for rank in ranks[:MOST_RANKS] if (source := found[rank]) is not None}


def source_of(config: Mapping[str, Any], host: str | None, rank: int = 0) -> Source | None:
    """Return the source that a `--kv-events-config` makes; None when it makes none that can be reached.

    The rank is added to the ports. In what a server tells of each rank, that is done already.
    """
    publisher = config.get("publisher") or "zmq"
    if config.get("enable_kv_cache_events") is not True or publisher != "zmq":
        return None
    events = address(config.get("endpoint", DEFAULT_ENDPOINT), host, rank)
    replay = config.get("replay_endpoint")
    if events is None:
        return None
    return Source(events, None if replay is None else address(replay, host, rank))


def address(endpoint: object, host: str | None, rank: int = 0) -> str | None:
    """Return where to connect to for an endpoint that an engine has bound; None when nowhere."""
    if not isinstance(endpoint, str):
        return None
    if _IPC.fullmatch(endpoint):
        return endpoint if host is None and rank == 0 else None
    match = _TCP.fullmatch(endpoint)
    if match is None:
        return None
    named, port = match[1], int(match[2]) + rank
    if port > 65535:
        return None
    if named in _EVERYWHERE:
        named = "127.0.0.1" if host is None else f"[{host}]" if ":" in host else host
    return f"tcp://{named}:{port}"
