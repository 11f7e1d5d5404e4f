"""A new process of the gateway finds the backends serving that the old one has, before it accepts anybody."""

import asyncio

import pytest

from gateway.config.load import load_config
from gateway.core.aio import SystemClock, start
from gateway.core.types import ModelsSeen, ProbePassed
from gateway.ops.upgrading import UpgradeFailed
from gateway.pools.table import PoolTable
from gateway.upgrade.found import found_serving
from gateway.upgrade.messages import Go

CONFIG = "version: 1\npools: {m: {backends: [{name: a, url: 'http://127.0.0.1:1'}, {name: b, url: 'http://127.0.0.1:2'}]}}\n"


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "gateway.yaml"
    path.write_text(CONFIG)
    config = load_config(path).config
    table = PoolTable(SystemClock())
    table.apply(config.pools, config.health)
    return table


def comes_up(table, backend_id):
    now = table.clock.now() if hasattr(table, "clock") else SystemClock().now()
    table.observe(backend_id, ProbePassed(now))
    table.observe(backend_id, ModelsSeen(now, (), frozenset(), ""))


def waits(table, expects, within_s=0.05):
    return asyncio.run(found_serving(table, SystemClock(), expects, within_s))


def test_none_of_them_is_a_failed_upgrade(table):
    with pytest.raises(
        UpgradeFailed, match=r"none of the 2 backends that serve at the old process.*m/a, m/b"
    ):
        waits(table, Go(["m/a", "m/b"], []))


def test_some_of_them_are_enough_and_the_rest_is_told(table):
    comes_up(table, "m/a")
    assert waits(table, Go(["m/a", "m/b"], [])) == ["m/b"]


def test_all_of_them_need_no_wait(table):
    comes_up(table, "m/a")
    assert waits(table, Go(["m/a"], []), within_s=60.0) == []


def test_one_that_shows_metrics_there_is_waited_for_until_it_does_here(table):
    comes_up(table, "m/a")
    assert waits(table, Go(["m/a"], ["m/a"])) == ["m/a"]


def test_where_none_served_before_nothing_is_waited_for(table):
    assert waits(table, Go([], []), within_s=60.0) == []


def test_backends_that_are_configured_no_more_are_not_waited_for(table):
    assert waits(table, Go(["m/gone"], ["m/gone"]), within_s=60.0) == []


def test_it_goes_on_as_soon_as_they_serve(table):
    async def story():
        looking = asyncio.get_running_loop().create_future()

        async def look():
            looking.set_result(await found_serving(table, SystemClock(), Go(["m/b"], []), 60.0))

        task = start(look(), name="look")
        await asyncio.sleep(0)
        assert not looking.done()
        comes_up(table, "m/b")
        await task
        return looking.result()

    assert asyncio.run(story()) == []
