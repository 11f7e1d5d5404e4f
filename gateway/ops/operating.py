"""The verbs that order something of a running gateway, or read what its backends did."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Annotated, Any, Final
from urllib.parse import quote, urlencode

import typer

from gateway.ops.console import Exit, VerbError, ask, fetch, print_json, print_table
from gateway.ops.verbs import LOCAL, AsTable, Server, Token

_POLL_S: Final = 1.0
_SERVES: Final = frozenset({"ready", "degraded"})

Done = Callable[[dict[str, Any]], bool]  # of a backend as the overview tells it

Backend = Annotated[str, typer.Argument(metavar="BACKEND", help="Its id, pool/name.")]
Reason = Annotated[str, typer.Option(help="Why; kept with the event.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only say what it would touch.")]
Force = Annotated[
    bool,
    typer.Option(
        "--force", help="Even the last backend that serves; a restart under way begins anew."
    ),
]
Wait = Annotated[bool, typer.Option("--wait", help="Return when it is done.")]
Timeout = Annotated[str, typer.Option(help="How long --wait waits: 10m.")]


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
    """Give a backend no new work; what it carries finishes. Exit code 5: it is the last one."""
    order = {"reason": reason, "dry_run": dry_run, "force": force}
    _order(server, token, backend, "drain", order, output)
    if wait and not dry_run:
        _until(server, token, backend, timeout, lambda now: bool(now["in_flight"] == 0))


def undrain(
    backend: Backend, server: Server = LOCAL, token: Token = "", output: AsTable = "table"
) -> None:
    """Put a backend back into service. It clears a suspension, too."""
    _order(server, token, backend, "undrain", {}, output)


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
    """Drain a backend, restart it and try it. Exit code 5: it is the last one, or not ours to restart."""
    order = {"reason": reason, "dry_run": dry_run, "force": force}
    _order(server, token, backend, "restart", order, output)
    if wait and not dry_run:
        time.sleep(_POLL_S)  # the order is taken up within a turn
        _until(server, token, backend, timeout, _restarted)


def logs(
    backend: Backend,
    size: Annotated[str, typer.Option("--bytes", help="How much of its end.")] = "65536",
    server: Server = LOCAL,
    token: Token = "",
) -> None:
    """Print the end of what a backend wrote since its start."""
    path = f"/admin/v1/backends/{quote(backend)}/logs?{urlencode({'bytes': size})}"
    sys.stdout.buffer.write(fetch(server, path, token, timeout_s=30.0))


def hold(
    pool: Annotated[str | None, typer.Option(help="Of this pool alone. Default: of all.")] = None,
    for_: Annotated[
        str | None, typer.Option("--for", help="How long: 30m. Default: until lifted.")
    ] = None,
    lift: Annotated[bool, typer.Option("--lift", help="Let them go on.")] = False,
    reason: Reason = "",
    server: Server = LOCAL,
    token: Token = "",
) -> None:
    """Hold automatic restarts; operators' own go on."""
    seconds = None if for_ is None else _seconds("--for", for_)
    order: dict[str, object] = {"pool": pool, "for_s": seconds, "reason": reason}
    ask(server, f"/admin/v1/restarts:{'lift' if lift else 'hold'}", token, order=order)
    of = "all pools" if pool is None else pool
    how_long = "" if seconds is None else f" for {for_}"
    sys.stderr.write(f"restarts of {of} {'go on' if lift else 'are on hold' + how_long}\n")


def events(
    limit: Annotated[int, typer.Option(min=1, max=1000, help="How many.")] = 20,
    server: Server = LOCAL,
    token: Token = "",
    output: AsTable = "table",
) -> None:
    """List what supervision did and why, the newest first."""
    told = ask(server, f"/admin/v1/events?limit={limit}", token)
    if output == "json":
        print_json(told)
        return
    rows = [{**each, "at": each["at"][:19].replace("T", " ")} for each in told.get("data", [])]
    print_table(rows, empty="nothing happened yet")


def _order(
    server: str, token: str, backend: str, verb: str, order: dict[str, object], output: str
) -> None:
    told = ask(server, f"/admin/v1/backends/{quote(backend)}:{verb}", token, order=order)
    if output == "json":
        print_json(told)
    else:
        dry = "would: " if told.get("dry_run") else ""
        sys.stdout.write(f"{dry}{told.get('sentence')}\n")


def _until(server: str, token: str, backend: str, timeout: str, done: Done) -> None:
    """Wait until the overview shows what was ordered; its detail goes to standard error meanwhile."""
    deadline, told = time.monotonic() + _seconds("--timeout", timeout), ""
    while time.monotonic() < deadline:
        overview = ask(server, "/admin/v1/overview", token)
        every = [each for pool in overview["pools"] for each in pool["backends"]]
        now = next((each for each in every if each["id"] == backend), None)
        if now is None:
            raise VerbError(f"{backend} is no longer there", code=Exit.NOT_FOUND)
        if done(now):
            return
        if now["detail"] != told:
            told = now["detail"]
            sys.stderr.write(f"{now['phase']}: {told}\n")
        time.sleep(_POLL_S)
    raise VerbError(f"not done after {timeout}; it goes on", "see `vllm-gateway status`")


def _restarted(now: dict[str, Any]) -> bool:
    """Whether it serves.

    Raises:
        VerbError: it does not, and nothing will be done about it.
    """
    told = now.get("supervision") or {}
    if told.get("suspended") or (told.get("waits") or {}).get("why") == "manual":
        why = f"{now['id']} does not serve, and nothing restarts it again: {now['detail']}"
        raise VerbError(why, f"see `vllm-gateway logs {now['id']}` and `vllm-gateway events`")
    return now["phase"] in _SERVES


def _seconds(name: str, text: str) -> float:
    from gateway.config.units import parse_duration

    try:
        return parse_duration(text)
    except ValueError as error:
        raise VerbError(f"{name}: {error}", code=Exit.USAGE) from error
