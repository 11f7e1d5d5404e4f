"""An engine that works is left alone, however slow or silent; one that does not loses its requests."""

import asyncio

from gateway.core.events import EventKind
from gateway.core.types import Phase
from gateway.heal.charge import Timing
from tests.stories.supervised import fleet, launched, machine
from tests.stories.support import story


@story
async def test_load_is_no_evidence_against_a_server_without_metrics():
    """The canary queues behind a full batch. Our own streams tell that the engine works."""
    async with machine() as on:
        slot = on["m/b1"]
        slot.speed, slot.max_num_seqs = 1.0, 1
        quick = {"supervision": {"canary": "200ms"}}
        async with fleet(on, launched(slot), timing=Timing(0.02, token_s=0.3), **quick) as world:
            first = slot.sim
            first.inject("no_metrics")
            await world.until(lambda: world.backend().stale(world.process.clock.now()))
            async with asyncio.TaskGroup() as group:
                streams = [
                    group.create_task(world.chat(max_tokens=250, stream=True)) for _ in range(2)
                ]
                asked = len(first.received("/v1/completions"))
                await world.until(lambda: len(first.received("/v1/completions")) > asked + 2)
            assert all(each.result().text.endswith("data: [DONE]\n\n") for each in streams)
            assert not world.told(EventKind.RESTART)
            assert slot.sim is first
            assert all(each.after is not Phase.DOWN for each in world.process.table.transitions)
