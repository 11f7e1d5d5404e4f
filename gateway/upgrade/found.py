"""Wait, in the new process, until the backends that serve at the old one serve here too."""

from __future__ import annotations

import asyncio
from typing import Final

from gateway.core.aio import Clock
from gateway.core.types import SERVING
from gateway.ops.upgrading import UpgradeFailed
from gateway.pools.table import PoolTable
from gateway.upgrade.messages import Go

_FOUND_S: Final = 15.0  # for this process to find that backends serve
_LOOK_S: Final = 0.02


async def found_serving(
    table: PoolTable, clock: Clock, expects: Go, within_s: float = _FOUND_S
) -> list[str]:
    """Wait until the backends that serve at the old process serve here too; return those that do not in time.

    Raises:
        UpgradeFailed: none of them does.
    """
    deadline = clock.now() + within_s
    while (missing := _missing(table, expects)) and clock.now() < deadline:  # noqa: ASYNC110 - nobody tells
        await asyncio.sleep(_LOOK_S)
    known = [each for each in expects.serving if table.get(each) is not None]
    if known and not any(each.phase in SERVING for each in table):
        raise UpgradeFailed(
            f"none of the {len(known)} backends that serve at the old process was found to serve from the"
            f" new one within {within_s:g} s: {', '.join(known[:5])}"
        )
    return missing


def _missing(table: PoolTable, expects: Go) -> list[str]:
    """Return the backends that serve, or show metrics, at the old process and not here."""
    measured, missing = frozenset(expects.measured), []
    for backend_id in expects.serving:
        backend = table.get(backend_id)
        if backend is None:
            continue
        if backend.phase not in SERVING or (backend_id in measured and backend.sample is None):
            missing.append(backend_id)
    return missing
