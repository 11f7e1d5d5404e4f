"""What is wrong with the gateway itself: what it depends on, its settings, and its callers. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeVar

from gateway.config.oidc import HOLDER_ID
from gateway.core.printable import count
from gateway.core.roles import ON_THIS_MACHINE
from gateway.ops.callers import Callers
from gateway.ops.problems import Problem, sentence
from gateway.ops.reloads import Reload

if TYPE_CHECKING:
    from gateway.ops.overview import Overview

Number = TypeVar("Number", int, float)

_MIB: Final = 1024 * 1024
_MOST_KEYS: Final = 3  # that are told one by one


@dataclass(frozen=True, slots=True, kw_only=True)
class Own:
    """What is known of the gateway itself, beside its overview."""

    settings_file: str = "the settings file"
    file_changed_wall: float | None = None  # when it was written last, if that is not in force
    reloads: Sequence[Reload] = ()  # the newest first
    disk: str = ""  # the folder of its state
    disk_free_bytes: int | None = None
    disk_least_bytes: int = 0
    disk_unwritable: str = ""  # why nothing can be written there
    state_shared_with: str = ""  # the gateway that writes there, too
    callers: Callers = Callers()  # of all workers
    client_write_s: float = 60.0
    keys_known: bool = True
    keys_trouble: str = ""  # why the keys file is not in force
    redis: bool = False


def own_problems(overview: Overview, own: Own, wall_less_now: float) -> Iterator[Problem]:
    """Yield what is wrong with the gateway itself; `wall_less_now` leads from wall time to monotonic."""
    if overview["draining"]:
        left = count(overview["totals"]["in_flight"], "request")
        yield Problem(
            kind="shutting_down", severity="degraded", subject="gateway",
            what=f"The gateway shuts down: {left} in flight, and soon no new connections",
            remedy="Start it again, or let another replica take over.",
        )  # fmt: skip
    yield from _shared(overview, own)
    yield from _reloads(own, wall_less_now)
    yield from _disk(own)
    for hold in overview["holds"]:
        of = "all pools" if hold["pool"] is None else f"pool {hold['pool']}"
        end = hold["until"]  # with its day: it may last for 30 of them
        until = "until it is lifted" if end is None else f"until {end[:10]} {end[11:19]} UTC"
        name = "" if hold["pool"] is None else f" --pool {hold['pool']}"
        yield Problem(
            kind="restarts_held", severity="note", subject=f"restarts of {of}",
            what=f"Automatic restarts of {of} are on hold {until}, by an operator's order",
            cause=sentence(hold["reason"]),
            remedy=f"Run `vllm-gateway hold --lift{name}` to end it.",
        )  # fmt: skip
    yield from _callers(own)


def _shared(overview: Overview, own: Own) -> Iterator[Problem]:
    store = overview["store"]
    if store is not None and store["trouble"]:
        what = "Redis" if own.redis else "The store that the workers share"
        yield Problem(
            kind="store_lost", severity="degraded", subject="redis" if own.redis else "store",
            what=f"{what} does not answer: {store['trouble']}",
            cause="Requests are served. Shared limits do as `on_outage` says, and no backend is restarted.",
            remedy="Start Redis, or correct `redis` in the settings; `vllm-gateway check FILE --probe` tries it."
            if own.redis else "Restart the gateway.",
        )  # fmt: skip
    if not own.keys_known:
        yield Problem(
            kind="keys_unknown", severity="down", subject="keys",
            what="No request is let in: the keys are not known",
            cause="They are in Redis, which does not answer, and there is no copy on this machine.",
            remedy="Start Redis, or correct `redis` in the settings.",
        )  # fmt: skip
    if own.keys_trouble:
        yield Problem(
            kind="keys_invalid", severity="degraded", subject="keys file",
            what="The keys file cannot be used: the keys before its last change are in force",
            cause=f"A key that was revoked there still works. {own.keys_trouble}",
            remedy="Correct it: `vllm-gateway check FILE` names every mistake. It is read again within a second.",
        )  # fmt: skip
    for each in [] if store is None else store["replicas"]:
        if each["alive"] and not each["config_agrees"]:
            yield Problem(
                kind="replicas_differ", severity="degraded", subject=f"replica {each['id']}",
                what=f"Replica {each['id']} on {each['host']} has other settings than this one",
                remedy="Give both the same file, then run `vllm-gateway reload` for each.",
            )  # fmt: skip


def _reloads(own: Own, wall_less_now: float) -> Iterator[Problem]:
    last = next(iter(own.reloads), None)
    if last is None:
        return
    if not last.done:
        asked = "asked for on this machine" if last.by == ON_THIS_MACHINE else f"by {last.by}"
        more = f" ({len(last.findings) - 1} more)" if len(last.findings) > 1 else ""
        yield Problem(
            kind="reload_failed", severity="degraded", subject="reload",
            what=f"The last reload, {asked}, was refused: the settings before it stay in force",
            cause=f"{last.findings[0] if last.findings else 'The file is not valid.'}{more}",
            remedy=f"Correct {own.settings_file}, then run `vllm-gateway reload`.",
            since=last.at - wall_less_now,
        )  # fmt: skip
    elif own.file_changed_wall is not None:
        yield Problem(
            kind="reload_pending", severity="note", subject="reload",
            what=f"{own.settings_file} was changed, and the change is not in force",
            remedy="Run `vllm-gateway reload`; `vllm-gateway reload --dry-run` shows the effect.",
            since=own.file_changed_wall - wall_less_now,
        )  # fmt: skip
    waiting = [each for each in last.effect if each.startswith("needs a restart")]
    if last.done and waiting:
        yield Problem(
            kind="reload_pending", severity="note", subject="restart",
            what="Some settings of the file take effect only with a new process",
            cause=sentence(waiting[0]),
            remedy="Run `vllm-gateway upgrade`: no request is lost.",
            since=last.at - wall_less_now,
        )  # fmt: skip


def _disk(own: Own) -> Iterator[Problem]:
    if own.disk_unwritable:
        yield Problem(
            kind="state_unwritable", severity="degraded", subject="state",
            what=f"The state folder {own.disk} cannot be written",
            cause=sentence(f"{own.disk_unwritable}; drains, holds, names of backends and the history of this gateway"
                           " end with it"),
            remedy="Let the gateway's user write there, or set `state` to another folder and restart the gateway.",
        )  # fmt: skip
    if own.state_shared_with:
        yield Problem(
            kind="state_shared", severity="degraded", subject="state",
            what=f"The state folder {own.disk} is used by another gateway, too: {own.state_shared_with}",
            cause="Each undoes what the other keeps there: drains, holds, suspensions and remedies can be lost.",
            remedy="Give each gateway a `state` folder of its own, or stop one of them.",
        )  # fmt: skip
    left = own.disk_free_bytes
    if left is None or left >= own.disk_least_bytes:
        return
    yield Problem(
        kind="disk_low", severity="degraded", subject="disk",
        what=f"The disk of {own.disk} is nearly full: {left // _MIB} MiB are left",
        cause=f"The log of one launched server may need {own.disk_least_bytes // _MIB} MiB; when the disk is"
        " full, nothing can be launched, and no state is kept.",
        remedy="Free some space there, or set `state` to a folder on another disk.",
    )  # fmt: skip


def _limits_of(key: str) -> str:
    if key.startswith(HOLDER_ID):
        return (
            "A token has the limits of its tier: see `tiers`, and which one `keys.oidc` gives it."
        )
    return f"`vllm-gateway keys effective {key}` shows its limits, `vllm-gateway keys update {key}` changes them."


def _callers(own: Own) -> Iterator[Problem]:
    callers = own.callers
    for key, refused in _most(callers.over_limit):
        yield Problem(
            kind="key_over_limit", severity="note", subject=f"key {key}",
            what=f"Key {key} is over its limit: {count(refused, 'request')} refused with 429 in 5 min",
            cause=sentence(callers.why_over.get(key, "")),
            remedy=_limits_of(key),
            weight=refused,
        )  # fmt: skip
    for key, seconds in _most(callers.slow):
        whose = f"of key {key} " if key else ""
        yield Problem(
            kind="client_slow", severity="note", subject=f"client {key}".strip(),
            what=f"A client {whose}reads too slowly: its stream is blocked, and it has not read for {seconds:.0f} s",
            cause=f"Its buffers are full. After {own.client_write_s:.0f} s the stream is cut"
            " (`timeouts.client_write`). No other stream is held up.",
            remedy="Nothing to do here: look at the client, or at the proxy and network in front of it.",
            weight=seconds,
        )  # fmt: skip
    for key, cut in _most(
        {key: n for key, n in callers.stalled.items() if key not in callers.slow}
    ):
        whose = f"of key {key} " if key else ""
        yield Problem(
            kind="client_slow", severity="note", subject=f"client {key}".strip(),
            what=f"{count(cut, 'stream')} {whose}cut in 5 min, because the client did not read for"
            f" {own.client_write_s:.0f} s",
            cause="Its buffers were full (`timeouts.client_write`).",
            remedy="Nothing to do here: look at the client, or at the proxy and network in front of it.",
            weight=cut,
        )  # fmt: skip
    if callers.unknown_models:
        yield Problem(
            kind="unknown_model", severity="note", subject="model names",
            what=f"{count(callers.unknown_models, 'request')} in 5 min asked for a model that nobody serves",
            cause=sentence(callers.unknown_model and f"the last one was told: {callers.unknown_model}"),
            remedy="Correct the name at the client, or add it as an alias (`aliases`) or adapter of a pool.",
            weight=callers.unknown_models,
        )  # fmt: skip


def _most(counts: Mapping[str, Number]) -> list[tuple[str, Number]]:
    return sorted(counts.items(), key=lambda pair: -pair[1])[:_MOST_KEYS]
