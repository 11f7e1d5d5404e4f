"""The process's file descriptors: how many there may be, and how many of them clients may take.

A client's connection takes one, and one more to the backend once its request is sent. What is left
over is for probes, the admin listener, log files and launched servers, so none of them ever fails
because clients came. The loop accepts 32 connections in a turn (`listener`), so a burst goes beyond this by no more.
"""

from __future__ import annotations

import resource
from typing import Final

# More than one process of ours can use. Launched servers inherit it; vLLM asks for as many.
_ENOUGH: Final = 65_536
# Measured: 48 are open when nothing happens, 32 of them listeners. As many more may be accepted in one turn. The rest
# is for the admin listener and files.
_RESERVED: Final = 112
_PER_BACKEND: Final = 4  # three loops of probes, and a log
# One slow head holds up to `limits.max_header_bytes`: 320 MiB in all.
_MOST_CONNECTIONS: Final = 10_000
_LEAST: Final = 8
# Of the reserve: operators, and whoever scrapes metrics.
ADMIN_CONNECTIONS: Final = 24


def raise_limit() -> None:
    """Raise the soft limit of open files to the hard one, as servers do, but to no absurd number."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _ENOUGH if hard == resource.RLIM_INFINITY else min(hard, _ENOUGH)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def limit() -> int:
    """Return how many descriptors this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _ENOUGH if soft == resource.RLIM_INFINITY else soft


def most_connections(descriptors: int, backends: int, wanted: int | None = None) -> int:
    """Return how many connections clients may have: `wanted`, or as many as is sensible.

    Never more than leaves every other user of descriptors enough.
    """
    possible = (descriptors - _RESERVED - _PER_BACKEND * backends) // 2
    return min(max(_LEAST, possible), wanted or _MOST_CONNECTIONS)


def files_for(connections: int, backends: int) -> int:
    """Return how many descriptors so many connections of clients need, everything else included."""
    return 2 * connections + _RESERVED + _PER_BACKEND * backends
