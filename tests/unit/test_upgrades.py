"""Orders for an upgrade: one attempt answers all who asked for it by then."""

import asyncio

import pytest

from gateway.core.aio import start
from gateway.ops.upgrading import UpgradeFailed, Upgrades


@pytest.mark.parametrize("outcome", ["another process took over", UpgradeFailed("bad settings")])
def test_who_asks_while_one_is_tried_gets_its_outcome_and_asks_for_no_other(outcome):
    async def asked_twice():
        upgrades = Upgrades()
        first = start(upgrades.ask(), name="first")
        await upgrades.wanted.wait()
        upgrades.wanted.clear()  # it is tried
        second = start(upgrades.ask(), name="second")
        await upgrades.wanted.wait()
        upgrades.came_to(outcome)
        await asyncio.wait([first, second])
        found = [each.exception() or each.result() for each in (first, second)]
        return found, upgrades.wanted.is_set()

    assert asyncio.run(asked_twice()) == ([outcome] * 2, False)
