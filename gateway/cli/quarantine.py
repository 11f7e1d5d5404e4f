"""The verbs for requests that are refused because backends died as they were worked on."""

from __future__ import annotations

import sys
from typing import Annotated, Any
from urllib.parse import quote

import typer

from gateway.cli.console import ask, ask_all, print_list
from gateway.cli.terminal import clock
from gateway.cli.verbs import LOCAL, AsTable, Server, Token, group

quarantine_app = group(
    "List or lift requests that are refused because two backends died as they ran."
)


@quarantine_app.command("list", epilog="Example: vllm-gateway quarantine list -o json")
def quarantine_list(server: Server = LOCAL, token: Token = "", output: AsTable = "table") -> None:
    """List the requests in quarantine, which backends died, and which tenants sent them again."""
    told = ask_all(server, "/admin/v1/quarantine", token)
    print_list(told, output, _row, empty="no request is in quarantine")


@quarantine_app.command("lift", epilog="Example: vllm-gateway quarantine lift 5f0c9a1b2d3e")
def quarantine_lift(
    name: Annotated[str, typer.Argument(metavar="ID", help="The request, as `list` shows it.")],
    server: Server = LOCAL,
    token: Token = "",
) -> None:
    """Let a request be sent again."""
    ask(server, f"/admin/v1/quarantine/{quote(name)}:lift", token, order={})
    sys.stdout.write(f"{name} may be sent again\n")


def _row(each: dict[str, Any]) -> dict[str, object]:
    return {
        "id": each["id"],
        "pool": each["pool"],
        "bytes": each["body_bytes"],
        "until": clock(each["until"]),
        "died": ", ".join(death["backend"] for death in each["deaths"]),
        "refused": ", ".join(f"{tenant}: {count}" for tenant, count in each["refused"].items()),
    }
