"""What a launcher, or the store, could not do just now stays due; what was done once counts once."""

from __future__ import annotations

import asyncio
import sys

import pytest

from gateway.core.aio import SystemClock
from gateway.core.events import EventKind
from gateway.core.types import Phase
from gateway.heal.decisions import Cause
from gateway.heal.fleet import launcher_of
from gateway.heal.handover import begun, take_up, unfinished
from gateway.heal.observed import Timing
from gateway.launch.launcher import LaunchError, Obstacle
from gateway.ops.upgrading import UpgradeFailed
from gateway.store.memory import MemoryStore
from gateway.store.shared import StoreUnavailable
from gateway.upgrade import messages
from tests.stories.supervised import fleet, held, launched, machine, managed
from tests.stories.support import story


async def both(on):
    """Two servers of a service manager's, which run."""
    for name in ("m/b1", "m/b2"):
        await on[name].begin()
    return managed(on["m/b1"]), managed(on["m/b2"])


@pytest.mark.parametrize("obstacle", [Obstacle.TRANSIENT, Obstacle.CANNOT_HELP])
@story
async def test_an_operators_restart_stays_due_while_its_launcher_is_away_for_now(obstacle):
    async with machine() as on, fleet(on, *await both(on)) as world:
        slot = world.slot()
        slot.obstacle, slot.refuses = obstacle, ["Docker did not answer"] * 2
        assert (await world.order("restart")).json()["changed"]
        if obstacle is Obstacle.CANNOT_HELP:  # only a person can change that, and orders it again
            await world.until(lambda: world.told(EventKind.LAUNCH_FAILED))
            await world.turns(20)
            assert slot.starts == []
            return
        await world.until(lambda: len(slot.starts) == 1)
        await world.serves()
        assert len(world.told(EventKind.LAUNCH_FAILED)) == 2
        assert {each.label for each in world.told(EventKind.RESTART)} == {Cause.OPERATOR.value}
        await world.turns(20)
        assert len(slot.starts) == 1


@pytest.mark.parametrize("obstacle", [Obstacle.TRANSIENT, Obstacle.CANNOT_HELP])
@story
async def test_a_scheduled_restart_that_cannot_be_carried_out_does_not_drain_it_again_and_again(
    obstacle,
):
    async with machine() as on:
        often = {"supervision": {"restart_every": "1s", "backoff": "20ms"}}
        async with fleet(on, *await both(on), **often) as world:
            slot = world.slot()
            slot.obstacle, slot.refuses = obstacle, ["systemd is away"] * 1000
            await world.until(lambda: world.told(EventKind.LAUNCH_FAILED, "m/b1"))
            await world.serves("m/b1")
            await world.turns(50)
            assert len(world.told(EventKind.LAUNCH_FAILED, "m/b1")) == 1
            assert world.phase() is Phase.READY


class Claimless(MemoryStore):
    """A store that is away when a restart is claimed, so many times."""

    def __init__(self):
        super().__init__(SystemClock())
        self.away = 0

    async def claim_restart(self, backend_id, incarnation, attempt=1):
        if self.away:
            self.away -= 1
            raise StoreUnavailable
        return await super().claim_restart(backend_id, incarnation, attempt)


@story
async def test_an_operators_restart_stays_due_while_the_store_is_away():
    async with machine() as on:
        store = Claimless()
        async with fleet(on, *await both(on), store=store) as world:
            store.away = 2
            assert (await world.order("restart")).json()["changed"]
            await world.until(lambda: len(world.slot().starts) == 1)
            await world.serves()


@story
async def test_an_operators_restart_stays_due_that_the_gateway_before_claimed_and_could_not_carry_out():
    async with machine() as on:
        store, slot = MemoryStore(SystemClock()), on["m/b1"]
        backends = await both(on)
        rarely = {"store": store, "supervision": {"backoff": "10m", "max_backoff": "10m"}}
        async with fleet(on, *backends, **rarely) as one:
            slot.obstacle, slot.refuses = Obstacle.TRANSIENT, ["systemd is away"]
            assert (await one.order("restart")).json()["changed"]
            await one.until(lambda: one.told(EventKind.LAUNCH_FAILED))
        soon = {"store": store, "supervision": {"stop_grace": "100ms"}}
        async with fleet(on, *backends, **soon) as another:
            assert (await another.order("restart")).json()["changed"]
            await another.until(lambda: slot.starts)
            await another.serves()
            (told,) = another.told(EventKind.LAUNCH_FAILED)
            assert "began this restart" in told.detail
            await another.turns(20)
            assert len(slot.starts) == 1


@story
async def test_a_restart_that_is_ordered_at_two_gateways_is_carried_out_by_one():
    async with machine() as on:
        store, slot, backends = MemoryStore(SystemClock()), on["m/b1"], await both(on)
        async with (
            fleet(on, *backends, store=store) as one,
            fleet(on, *backends, store=store) as other,
        ):
            slot.lasts = asyncio.Event()
            assert (await one.order("restart")).json()["changed"]
            await one.until(lambda: slot.stops)
            assert (await other.order("restart")).json()["changed"]
            await other.until(lambda: other.told(EventKind.LAUNCH_FAILED))
            assert other.unit().under_way  # until it is seen that the other one did it
            slot.lasts.set()
            await one.until(lambda: slot.starts)
            await other.until(lambda: not other.unit().under_way)
            assert (len(slot.starts), other.unit().ordered) == (1, None)


@story
async def test_a_restart_whose_incarnation_shows_later_counts_once():
    async with machine() as on, fleet(on, *await both(on)) as world:
        slot = world.slot()
        slot.late = 3
        await slot.die()
        await world.until(lambda: slot.starts)
        await world.serves()
        await world.turns()
        record = world.process.supervisor.history.of("m/b1")
        assert (len(record.restarts), record.in_a_row) == (1, 1)


@story
async def test_an_order_given_before_the_new_server_is_seen_is_carried_out_once_it_is():
    async with machine() as on, fleet(on, *await both(on)) as world:
        slot = world.slot()
        slot.late = 100_000  # looks that still show what was before
        assert (await world.order("restart")).json()["changed"]
        await world.until(lambda: len(slot.starts) == 1)
        assert (await world.order("restart", force=True)).json()["changed"]
        await world.until(lambda: world.told(EventKind.LAUNCH_FAILED))
        slot.late = 0
        slot.shown.clear()
        await world.until(lambda: len(slot.starts) == 2)
        await world.serves()


@story
async def test_what_we_stopped_and_could_not_start_is_started_though_its_manager_shows_nothing():
    async with machine() as on, fleet(on, *await both(on)) as world:
        slot, launcher = world.slot(), world.unit().launcher
        carry_out = launcher.restart

        async def stops_and_does_not_start(*_args, **_more):
            launcher.restart = carry_out
            await slot.end()
            slot.gone = True
            raise LaunchError(
                "a unit that it depends on could not be started", Obstacle.CANNOT_HELP
            )

        launcher.restart = stops_and_does_not_start
        assert (await world.order("restart")).json()["changed"]
        await world.until(lambda: slot.starts)
        await world.serves()
        assert world.phase() is Phase.READY


@story
async def test_what_its_service_manager_stops_gracefully_finishes_what_it_carries():
    async with machine() as on:
        slot = on["m/b1"]
        slot.decode_step_s, slot.speed = 0.02, 1.0
        async with fleet(on, *await both(on)) as world:
            await world.order("drain", "m/b2")  # so that b1 gets it
            async with asyncio.TaskGroup() as group:
                asked = group.create_task(world.chat(max_tokens=100))
                await world.until(lambda: world.backend().in_flight)
                with held(slot):
                    slot.running, slot.pending = False, True
                    await world.until(lambda: world.backend().reason == "pending")
                    await world.turns(20)
                    assert not asked.done()
            assert asked.result().status_code == 200


ENDS_LATE = f"""#!{sys.executable}
import os, socket
from gateway.upgrade import messages
channel = socket.socket(fileno=messages.inherits(os.environ[messages.VARIABLE]).channel)
channel.send(messages.encode(messages.Loaded(os.getpid(), "9.9")))
told = channel.recv(messages.MOST_BYTES)  # what is done to backends has paused
open(__file__ + ".told", "wb").write(told)
"""


@story
async def test_a_restart_goes_on_after_an_upgrade_that_failed_while_its_server_was_stopped(
    tmp_path, monkeypatch
):
    program = tmp_path / "vllm-gateway"
    program.write_text(ENDS_LATE)
    program.chmod(0o755)
    monkeypatch.setattr(sys, "argv", [str(program)])
    async with machine() as on, fleet(on, *await both(on)) as world:
        slot = world.slot()
        slot.lasts = asyncio.Event()
        assert (await world.order("restart")).json()["changed"]
        await world.until(lambda: slot.stops)
        with pytest.raises(UpgradeFailed, match="before it could serve"):
            await world.process.upgrades.ask()
        told = messages.decode((tmp_path / "vllm-gateway.told").read_bytes())
        assert told.tried == {"m/b1": ("m/b1#1", 1)}  # though systemd goes on with it by itself
        slot.lasts.set()
        await world.until(lambda: len(slot.starts) == 1)
        await world.serves()
        assert [each.label for each in world.told(EventKind.RESTART)] == [Cause.OPERATOR.value]
        await world.turns(20)
        assert len(slot.starts) == 1


@story
async def test_a_restart_that_was_claimed_is_carried_out_by_the_next_process_too():
    async with machine() as on:
        slot, store = on["m/b1"], MemoryStore(SystemClock())
        for name in ("m/b1", "m/b2"):
            await on[name].begin()
        told = [launched(each, on_exit="leave") for each in (slot, on["m/b2"])]
        manual = {"store": store, "supervision": {"automatic": False}}
        async with fleet(on, *told, **manual) as world:
            slot.lasts = asyncio.Event()
            assert (await world.order("restart", reason="a leak")).json()["changed"]
            await world.until(lambda: slot.stops)
            supervisor = world.process.supervisor
            left, tried = unfinished(supervisor.units.values()), begun(supervisor)
            assert left == {"m/b1": "ordered by an operator: a leak"}
        slot.lasts = None
        await slot.end()
        assert not slot.starts
        async with fleet(on, *told, wait=False, **manual) as world:
            take_up(world.process.supervisor, left, tried)
            await world.until(lambda: slot.starts)
            await world.serves()
            await world.turns(20)
            assert len(slot.starts) == 1


@story
async def test_what_was_being_restarted_as_it_hung_is_restarted_by_the_next_process_at_once():
    async with machine() as on:
        slot, store = on["m/b1"], MemoryStore(SystemClock())
        told = [launched(each, on_exit="leave") for each in (slot, on["m/b2"])]
        timing = Timing(0.02, token_s=0.4, last_words_s=0.1)
        tested = {"store": store, "timing": timing, "supervision": {"canary": "200ms"}}
        async with fleet(on, *told, **tested) as world:
            slot.lasts = asyncio.Event()  # it does not end when it is told to
            slot.sim.inject("frozen")
            await world.until(lambda: slot.stops)
            supervisor = world.process.supervisor
            left, tried = unfinished(supervisor.units.values()), begun(supervisor)
            assert (left, [*tried]) == ({}, ["m/b1"])
        slot.lasts, before = None, len(slot.starts)
        async with fleet(on, *told, wait=False, **tested) as world:
            take_up(world.process.supervisor, left, tried)
            await world.until(lambda: len(slot.starts) > before)
            await world.serves()
            assert [each.label for each in world.told(EventKind.RESTART)] == [Cause.FROZEN.value]


@story
async def test_what_a_service_manager_was_asked_for_is_not_asked_for_again_by_the_next_process():
    async with machine() as on, fleet(on, *await both(on)) as world:
        slot, units = world.slot(), world.process.supervisor.units
        slot.lasts = asyncio.Event()
        assert (await world.order("restart")).json()["changed"]
        await world.until(lambda: slot.stops)
        assert unfinished(units.values()) == {}
        slot.lasts.set()


@story
async def test_a_restart_command_that_ends_with_its_gateway_is_run_again_by_the_next_process(
    tmp_path,
):
    async with machine() as on:
        begun = tmp_path / "begun"
        every = await both(on)
        for each in every:
            each["restart"] = {"command": ["sh", "-c", f"touch {begun}; sleep 60"]}
        async with fleet(on, *every, make_launcher=launcher_of) as world:
            assert (await world.order("restart", reason="a leak")).json()["changed"]
            await world.until(begun.exists)
            left = unfinished(world.process.supervisor.units.values())
            assert left == {"m/b1": "ordered by an operator: a leak"}


@story
async def test_what_a_restart_command_says_is_told_without_secrets():
    async with machine() as on:
        every = await both(on)
        says = "echo 'curl: Authorization: Bearer abcdef0123456789'; echo no; exit 3"
        every[0]["restart"] = {"command": ["sh", "-c", says]}
        async with fleet(on, *every, make_launcher=launcher_of) as world:
            assert (await world.order("restart")).json()["changed"]
            await world.until(lambda: world.told(EventKind.LAUNCH_FAILED))
            assert "exit code 3" in world.told(EventKind.LAUNCH_FAILED)[0].detail
            await world.until(lambda: world.unit().observed.trouble)
            shown = [
                await world.admin("GET", f"/admin/v1/{each}") for each in ("events", "overview")
            ]
            assert not [each for each in shown if "abcdef0123456789" in each.text]
            kept = (world.path.parent / "state" / "events.jsonl").read_text()
            assert "abcdef0123456789" not in kept
