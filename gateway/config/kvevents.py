"""Settings of an engine's KV events, and what the command line of a launched server says of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Final

from pydantic import Field

from gateway.config.flags import in_force
from gateway.config.supervision import LaunchConfig
from gateway.config.units import Section, setting

_FLAG: Final = "kv-events-config"
Endpoint = Annotated[
    str, Field(pattern=r"^(tcp://[^/ ]{1,255}:[1-9][0-9]{0,4}|ipc:///[^ ]{1,100})$")
]


class KvEventsConfig(Section):
    """Where a server publishes its KV events. A plain endpoint is short for {endpoint: ...}."""

    endpoint: Endpoint = Field(
        description="As in vLLM's --kv-events-config: tcp://*:5557 is port 5557 of the backend's host."
    )
    replay_endpoint: Endpoint | None = setting(
        None, "Its replay_endpoint. Without one, what is missed makes the gateway begin anew."
    )
    ranks: Annotated[int, Field(ge=1, le=256)] = setting(
        1, "Engines behind one server (--data-parallel-size); each adds its rank to the ports."
    )


def flag_of(launch: LaunchConfig) -> tuple[Mapping[str, Any], int] | None:
    """Return the `--kv-events-config` of a launched server and how many engines it has; None without one."""
    flags = in_force(launch.command, launch.args)
    whole = flags.get(_FLAG)
    if isinstance(whole, str):
        try:
            whole = json.loads(whole)
        except ValueError:
            return None  # vLLM will refuse it
    parts = {
        name.removeprefix(_FLAG + "."): value == "true" if value in ("true", "false") else value
        for name, value in flags.items()
        if name.startswith(_FLAG + ".")
    }
    if not isinstance(whole, Mapping):
        whole = {}
    if not whole and not parts:
        return None
    ranks = str(flags.get("data-parallel-size", 1))
    return {**whole, **parts}, int(ranks) if ranks.isdecimal() else 1
