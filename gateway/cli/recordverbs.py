"""The verbs that read what was done to a gateway and by whom, and what it is made of."""

from __future__ import annotations

from typing import Any

from gateway.cli.console import ask, ask_all, print_list
from gateway.cli.terminal import clock
from gateway.cli.verbs import LOCAL, AsTable, Limit, Server, Token


def audit(
    limit: Limit = 20, server: Server = LOCAL, token: Token = "", output: AsTable = "table"
) -> None:
    """List the changes that were asked for over the admin API, newest first: who, what and why."""
    told = ask(server, f"/admin/v1/audit?limit={limit}", token)
    print_list(told, output, _entry, empty="no changes yet")


def replicas(server: Server = LOCAL, token: Token = "", output: AsTable = "table") -> None:
    """List the workers of this gateway, and the gateways that share its Redis."""
    told = ask_all(server, "/admin/v1/replicas", token)
    print_list(told, output, _replica, empty="this gateway is alone: `redis` is not set")


def _replica(each: dict[str, Any]) -> dict[str, object]:
    return {
        "id": each["id"],
        "worker": each.get("worker") or None,
        "host": each["host"],
        "pid": each["pid"],
        "version": each["version"],
        "alive": "yes" if each["alive"] else f"not heard of for {each['heard_s']} s",
        "connections": each.get("connections"),
        "configuration": "the same" if each["config_agrees"] else "differs",
        "restarts": ", ".join(each["leads"]) or "none",
    }


def _entry(told: dict[str, Any]) -> dict[str, Any]:
    return {
        "at": clock(told["at"]),
        "who": f"{told['who']} ({told['address']})",
        "action": told["action"].replace("_", " "),
        "of": told["target"] or None,
        "outcome": told["code"] or "done",
        "reason": told["reason"] or None,
    }
