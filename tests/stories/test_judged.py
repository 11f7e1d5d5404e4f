"""What operators are told of backends and problems is in the metrics too, so that alerts say the same."""

from gateway.observe.instruments import BACKEND_STATE, PROBLEM
from tests.stories.support import gateway, story


@story
async def test_a_backend_that_cannot_be_reached_and_its_pool_are_in_the_metrics():
    pools = "pools: {m: {backends: [<0>]}, gone: {backends: [http://127.0.0.1:9]}}"
    async with gateway(pools=pools) as world:
        values = world.process.metrics.counted()[0]
        # Problems are looked for each 5 s.
        told = {("m", "b1", "ready"), ("gone", "b1", "unreachable")}
        await world.until(lambda: set(values[BACKEND_STATE.name]) == told, seconds=25)
        assert ("pool_down", "down", "pool gone") in values[PROBLEM.name]
        text = await world.metrics()
        assert 'gateway_problem{kind="pool_down",severity="down",subject="pool gone"} 1.0' in text
        assert 'gateway_backend_state{backend="b1",pool="gone",state="unreachable"} 1.0' in text
        assert "127.0.0.1" not in text
