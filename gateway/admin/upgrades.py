"""The order that replaces this process by a new one."""

from __future__ import annotations

from http import HTTPStatus

from typing_extensions import TypedDict

from gateway.admin.desk import Desk
from gateway.admin.endpoint import Asked, Body, Problem, Query
from gateway.ops.upgrading import UpgradeFailed, UpgradeRefused


class UpgradedTold(TypedDict):
    """What came of an upgrade."""

    sentence: str


async def upgrade(desk: Desk, asked: Asked[Query, Body]) -> UpgradedTold:
    """Answer once a new process serves (200), or why none does (409, 502). Takes up to two minutes."""
    try:
        told = await desk.upgrades.ask()
    except UpgradeRefused as error:
        raise Problem(HTTPStatus.CONFLICT, "upgrade_refused", str(error)) from error
    except UpgradeFailed as error:
        detail = f"The upgrade failed; the gateway goes on serving with the old process: {error}"
        raise Problem(HTTPStatus.BAD_GATEWAY, "upgrade_failed", detail) from error
    return UpgradedTold(sentence=told)
