"""What the overview and its problems are made of, asked of the live objects; and who asks all the time."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Final

from gateway.admin.desk import Desk
from gateway.config.load import text_hash
from gateway.core.aio import apart, periodic
from gateway.core.errors import ModelNotFound
from gateway.core.events import EventKind
from gateway.core.types import Outcome
from gateway.heal.intent import Mark
from gateway.heal.orders import Verb
from gateway.launch.disk import LOW_BYTES
from gateway.ops.callers import Callers, together
from gateway.ops.gatewayproblems import Own
from gateway.ops.overview import Facts, overview
from gateway.ops.recent import Lately

_EVERY_S: Final = 1.0
_RARELY_S: Final = 5.0
# The share of time that looking takes at most: where it takes long it is done more rarely.
_SHARE: Final = 0.002
_LATELY_S: Final = 300.0
_LOOP_S: Final = 600.0
_SLOW_CLIENT_S: Final = 5.0
_ENDS: Final = frozenset({EventKind.EXITED, EventKind.START_FAILED})
_ANEW: Final = frozenset({Verb.UNDRAIN.value, Verb.RESTART.value})  # what was before counts no more


async def notice_problems(desk: Desk) -> None:
    """Look for problems each 1 to 5 s, for ever, so that metrics, since when, and the last hour are known.

    Cancel: at once.
    """
    took_s = 0.0

    async def turn() -> None:
        nonlocal took_s
        known = facts(desk)
        await asyncio.sleep(0)  # streams come first
        began_at, moment = desk.clock.now(), desk.moment()
        found = overview(known, moment)
        took_s = desk.clock.now() - began_at
        desk.past.note(found, moment.wall)
        desk.metrics.judged(
            [
                (pool["name"], backend["name"], backend["state"])
                for pool in found["pools"]
                for backend in pool["backends"]
            ],
            [(each["kind"], each["severity"], each["subject"]) for each in found["problems"]],
        )

    await periodic(turn, every_s=lambda: pause_s(took_s), name="problems")


async def watch_settings_file(desk: Desk) -> None:
    """Look each second whether the settings file is what is in force, for ever. Cancel: at once."""
    if desk.file is not None:
        await periodic(lambda: look_at_settings_file(desk), every_s=_EVERY_S, name="settings file")


async def look_at_settings_file(desk: Desk) -> None:
    """Note whether the settings file was changed. A thread reads it: a file server that hangs holds up nobody."""
    assert desk.file is not None
    loaded = desk.loaded()
    changed = await apart(partial(_changed_wall, desk.file, loaded.text_hash))
    desk.file_changed = loaded, changed


def pause_s(took_s: float) -> float:
    """Return how long to wait after a look that took so long, so that looking costs little."""
    return min(max(_EVERY_S, took_s / _SHARE), _RARELY_S)


def facts(desk: Desk) -> Facts:
    """Return what the overview is made of."""
    supervisor = desk.orders.supervisor
    return Facts(
        table=desk.table,
        metrics=desk.metrics,
        config=desk.loaded().config,
        file=desk.file,
        draining=desk.draining(),
        started_at=desk.started_at,
        gate=desk.deciding.gate,
        units=supervisor.units,
        holds=supervisor.holds,
        why_held=supervisor.intent.why_held,
        why_drained=partial(supervisor.intent.why, Mark.DRAINED),
        trial=desk.trial,
        replicas=desk.replicas,
        lately=Lately(desk.series),
        failed=_failed_adapters(desk),
        ended=_ended(desk),
        own=_own(desk),
        gpus=desk.gpus(),
        known=desk.problems,
    )


def _failed_adapters(desk: Desk) -> dict[str, dict[str, str]]:
    """Return why adapters are not loaded, by backend and adapter."""
    found: dict[str, dict[str, str]] = {}
    for each in desk.adapters.statuses():
        if each.state == "not_loaded":
            found.setdefault(each.backend_id, {})[each.adapter] = each.detail
    return found


def _ended(desk: Desk) -> Mapping[str, int]:
    """Return how often each backend ended or failed to start in the last ten minutes, since an operator saw to it."""
    now = desk.clock.wall()
    found: Counter[str] = Counter()
    anew: set[str] = set()
    for event in desk.orders.supervisor.events.newest():
        if not now - _LOOP_S <= event.at <= now:
            break  # long ago; or later than now, for the clock was set back since
        if event.kind is EventKind.OPERATOR and event.label in _ANEW:
            anew.add(event.backend_id)
        elif event.kind in _ENDS and event.backend_id not in anew:
            found[event.backend_id] += 1
    return found


def _own(desk: Desk) -> Own:
    loaded, (looked_for, changed_wall) = desk.loaded(), desk.file_changed
    config = loaded.config
    return Own(
        settings_file="the settings file" if desk.file is None else desk.file.name,
        file_changed_wall=changed_wall if looked_for is loaded else None,
        reloads=[*desk.reloading.history.newest()][:1],
        disk=str(config.state),
        disk_free_bytes=desk.disk.left,
        disk_least_bytes=LOW_BYTES,
        disk_unwritable=desk.disk.unwritable,
        state_shared_with=desk.disk.lock.other,
        callers=together([callers_seen(desk), *desk.callers_elsewhere]),
        client_write_s=config.timeouts.client_write,
        keys_known=all(passed for name, passed, _ in desk.ready().checks if name == "keys"),
        keys_trouble=desk.reloading.keys_trouble,
        redis=config.redis is not None,
    )


def callers_seen(desk: Desk) -> Callers:
    """Return whose requests ended badly in this process."""
    series, (why_over, last_unknown) = desk.series, _refusals(desk)
    return Callers(
        over_limit=series.callers(Outcome.REJECTED),
        why_over=why_over,
        stalled=series.callers(Outcome.CLIENT_STALLED),
        slow={key: for_s for key, for_s in desk.slow_clients().items() if for_s >= _SLOW_CLIENT_S},
        unknown_models=series.unknown_models(),
        unknown_model=last_unknown,
        uploading=_uploading(desk),
    )


def _changed_wall(file: Path, text_in_force: str) -> float | None:
    """Return when the file was written last; None while its text is what is in force. Blocking."""
    try:
        same = text_hash(file.read_bytes()) == text_in_force
        return None if same else file.stat().st_mtime
    except OSError:
        return None  # it was removed, or cannot be read: a reload would say so


def _uploading(desk: Desk) -> dict[str, int]:
    """Return how many requests of this process each backend waits for the rest of."""
    return Counter(
        down.record.backend_id
        for down in desk.requests.live()
        if down.upload is not None and down.upload.left_bytes != 0
        and down.record is not None and down.record.backend_id is not None
    )  # fmt: skip


def _refusals(desk: Desk) -> tuple[dict[str, str], str]:
    """Return what each key was told last of its limit, and whoever asked last for an unknown model."""
    since = desk.clock.wall() - _LATELY_S
    why_over: dict[str, str] = {}
    last_unknown = ""
    for refused in desk.early.callers.values():
        request = refused.request
        if refused.wall_at < since:
            continue
        if request["status"] == HTTPStatus.TOO_MANY_REQUESTS:
            why_over[request["key_id"] or ""] = request["message"]
        elif request["code"] == ModelNotFound.default_code:
            last_unknown = request["message"]
    return why_over, last_unknown
