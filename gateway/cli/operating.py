"""The verbs that order something of a running gateway, or read what its backends did."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Annotated, Any, Final
from urllib.parse import quote, urlencode

import typer

from gateway.cli.console import (
    Exit,
    VerbError,
    ask,
    ask_all,
    duration,
    fetch,
    option,
    print_json,
    print_list,
    print_table,
)
from gateway.cli.terminal import clock
from gateway.cli.verbs import LOCAL, AsTable, Limit, Server, Token, group
from gateway.core.bounds import LOG_BYTES, LONGEST_HOLD_S, MOST_LOG_BYTES

_POLL_S: Final = 1.0
_UPGRADE_S: Final = 150.0  # the gateway gives the new process 120 s
# So long after a drain began, what others tell that they carry is all: each tells and hears once a second, and sends
# no new request to the backend once it has heard.
_HEARD_S: Final = 4.0
_SERVES: Final = frozenset({"ready", "degraded"})

Done = Callable[[dict[str, Any], dict[str, Any]], bool]  # of an overview, and of a backend in it

Backend = Annotated[str, typer.Argument(metavar="BACKEND", help="The backend, as POOL/NAME.")]
Reason = Annotated[str, typer.Option(help="The reason, recorded with the event.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show what would happen; change nothing.")]
Force = Annotated[
    bool,
    typer.Option(
        "--force",
        help="Proceed even if it is the last backend that serves, or is already restarting.",
    ),
]
Wait = Annotated[bool, typer.Option("--wait", help="Wait until it is done.")]
Timeout = Annotated[str, typer.Option(help="How long to wait with --wait, such as 10m.")]


def drain(  # noqa: PLR0913 - the options of a verb
    backend: Backend,
    reason: Reason = "",
    dry_run: DryRun = False,
    force: Force = False,
    wait: Wait = False,
    timeout: Timeout = "10m",
    server: Server = LOCAL,
    token: Token = "",
    output: AsTable = "table",
) -> None:
    """Send a backend no new requests and let running ones finish.

    Exit code 5: it is the last backend that serves its pool.
    """
    # Read here, so that a mistake in it is told before anything is ordered.
    patience_s = option("--timeout", duration, timeout)
    order = {"reason": reason, "dry_run": dry_run, "force": force}
    give_order(server, token, f"{backend}:drain", order, output)
    if wait and not dry_run:
        _until(server, token, backend, patience_s, _emptied)


def undrain(
    backend: Backend, server: Server = LOCAL, token: Token = "", output: AsTable = "table"
) -> None:
    """Put a drained or suspended backend back into service."""
    give_order(server, token, f"{backend}:undrain", {}, output)


def restart(  # noqa: PLR0913 - the options of a verb
    backend: Backend,
    reason: Reason = "",
    dry_run: DryRun = False,
    force: Force = False,
    wait: Wait = False,
    timeout: Timeout = "60m",
    server: Server = LOCAL,
    token: Token = "",
    output: AsTable = "table",
) -> None:
    """Drain a backend, restart it and verify that it works.

    Exit code 5: it is the last backend that serves its pool, or the gateway cannot restart it.
    """
    patience_s = option("--timeout", duration, timeout)
    order = {"reason": reason, "dry_run": dry_run, "force": force}
    give_order(server, token, f"{backend}:restart", order, output)
    if wait and not dry_run:
        time.sleep(_POLL_S)  # the order is taken up within a turn
        _until(server, token, backend, patience_s, lambda _, now: _restarted(now))


def logs(
    backend: Backend,
    size: Annotated[
        int,
        typer.Option(
            "--bytes", min=0, max=MOST_LOG_BYTES, help="How many bytes, from the end of the log."
        ),
    ] = LOG_BYTES,
    server: Server = LOCAL,
    token: Token = "",
) -> None:
    """Print the end of a backend's log since it started."""
    path = f"/admin/v1/backends/{quote(backend)}/logs?{urlencode({'bytes': size})}"
    log = fetch(server, path, token, timeout_s=30.0)
    sys.stdout.buffer.write(log)
    if size and not log:
        sys.stderr.write("its log is empty: it has not been started, or has written nothing yet\n")


def hold(
    pool: Annotated[str | None, typer.Option(help="Only this pool. Default: all pools.")] = None,
    for_: Annotated[
        str | None, typer.Option("--for", help="How long, such as 30m. Default: until lifted.")
    ] = None,
    lift: Annotated[bool, typer.Option("--lift", help="End the hold.")] = False,
    reason: Reason = "",
    server: Server = LOCAL,
    token: Token = "",
) -> None:
    """Pause automatic restarts. You can still restart backends yourself."""
    if lift and for_ is not None:
        raise VerbError("use --for or --lift, not both", code=Exit.USAGE)
    seconds = None if for_ is None else option("--for", _hold_time, for_)
    order: dict[str, object] = {"pool": pool, "for_s": seconds, "reason": reason}
    told = ask(server, f"/admin/v1/restarts:{'lift' if lift else 'hold'}", token, order=order)
    of = "all pools" if pool is None else pool
    how_long = "" if seconds is None else f" for {for_}"
    now = "allowed again" if lift else f"on hold{how_long or ' until lifted'}"
    sys.stderr.write(f"automatic restarts of {of} are {now}\n")
    for each in told.get("others", []) if lift else ():
        whose, name = ("all pools", "") if each is None else (each, f" --pool {each}")
        sys.stderr.write(
            f"but those of {whose} are on hold still: `vllm-gateway hold --lift{name}`\n"
        )


def _hold_time(text: str) -> float:
    seconds = duration(text)
    if not 0 < seconds <= LONGEST_HOLD_S:
        raise ValueError(f"{text} must be more than 0s and at most 30d")
    return seconds


remedies_app = group("List or drop what remedies changed of the command lines of launched servers.")


@remedies_app.command("list", epilog="Example: vllm-gateway remedies list -o json")
def remedies_list(server: Server = LOCAL, token: Token = "", output: AsTable = "table") -> None:
    """List the remedies in force, and why each was applied."""
    told = ask_all(server, "/admin/v1/remedies", token)
    if output == "json":
        print_json(told)
        return
    rows = [
        {
            "backend": each["backend"],
            "at": clock(applied["at"]),
            "remedy": applied["remedy"],
            "why": applied["why"],
        }
        for each in told.get("data", [])
        for applied in each["applied"]
    ]
    print_table(rows, empty="no remedies are in force: all servers start as configured")


@remedies_app.command("drop", epilog="Example: vllm-gateway remedies drop qwen3-8b/b2")
def remedies_drop(
    backend: Backend, server: Server = LOCAL, token: Token = "", output: AsTable = "table"
) -> None:
    """Start a backend as configured again, from its next start on. Nothing is restarted."""
    give_order(server, token, f"{backend}/remedies:drop", {}, output)


def upgrade(server: Server = LOCAL, token: Token = "", output: AsTable = "table") -> None:
    """Have a new process of the gateway take over: other code or settings, and no request is lost.

    Exit code 1: the new process cannot serve, and the old one goes on. Exit code 5: it cannot work here.
    """
    _print_sentence(ask(server, "/admin/v1/upgrade", token, order={}, timeout_s=_UPGRADE_S), output)


def events(
    limit: Limit = 20,
    server: Server = LOCAL,
    token: Token = "",
    output: AsTable = "table",
) -> None:
    """List what the gateway did to its backends and why, newest first."""
    told = ask(server, f"/admin/v1/events?limit={limit}", token)
    print_list(told, output, lambda each: {**each, "at": clock(each["at"])}, empty="no events yet")


def give_order(server: str, token: str, what: str, order: dict[str, object], output: str) -> None:
    """Give an order for a backend, and print what comes of it; `what` is like `pool/b1:drain`."""
    _print_sentence(
        ask(server, f"/admin/v1/backends/{quote(what, safe='/:')}", token, order=order), output
    )


def _print_sentence(told: dict[str, Any], output: str) -> None:
    if output == "json":
        print_json(told)
    else:
        dry = "dry run: " if told.get("dry_run") else ""
        sys.stdout.write(f"{dry}{told.get('sentence')}\n")


def _until(server: str, token: str, backend: str, patience_s: float, done: Done) -> None:
    """Wait until the overview shows what was ordered; its detail goes to standard error meanwhile."""
    deadline, told = time.monotonic() + patience_s, ""
    while time.monotonic() < deadline:
        overview = ask(server, "/admin/v1/overview", token)
        every = [each for pool in overview["pools"] for each in pool["backends"]]
        now = next((each for each in every if each["id"] == backend), None)
        if now is None:
            raise VerbError(f"{backend} no longer exists", code=Exit.NOT_FOUND)
        if done(overview, now):
            return
        if now["detail"] != told:
            told = now["detail"]
            sys.stderr.write(f"{now['phase']}: {told}\n")
        time.sleep(_POLL_S)
    raise VerbError(
        f"not finished after {patience_s:g} s; it continues in the background",
        "see `vllm-gateway status`",
    )


def _emptied(overview: dict[str, Any], now: dict[str, Any]) -> bool:
    """Whether a drained backend carries no request, and nobody can be about to send one."""
    if now["in_flight"] or now.get("in_flight_elsewhere"):  # an older gateway does not tell it
        return False
    store = overview.get("store")
    if store is None:
        return True
    others = (each for each in store.get("replicas", []) if not each.get("here"))
    silent_s = max((each.get("heard_s", 0.0) for each in others), default=0.0)
    return bool(now["phase_age_s"] - silent_s >= _HEARD_S)


def _restarted(now: dict[str, Any]) -> bool:
    """Whether it serves.

    Raises:
        VerbError: it does not, and nothing will be done about it.
    """
    told = now.get("supervision") or {}
    if told.get("suspended") or (told.get("waits") or {}).get("why") == "manual":
        why = f"{now['id']} is down and will not be restarted automatically: {now['detail']}"
        raise VerbError(why, f"see `vllm-gateway logs {now['id']}` and `vllm-gateway events`")
    return now["phase"] in _SERVES and not told.get("restarting")
