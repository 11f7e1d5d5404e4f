"""The command line and the environment of a vLLM that the gateway launches. Pure.

A flag that is stated twice counts once: the changes of a start win over `args`, and `args` over `command`.
The address is always the configured one, on loopback and without TLS: the gateway talks to what listens
there, and vLLM without `--host` would listen on every interface.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Final

from pydantic import JsonValue

from gateway.config.flags import in_force, is_flag, merged, without
from gateway.config.supervision import LaunchConfig
from gateway.launch.launcher import Changes

HOST: Final = "127.0.0.1"
# Pages that the gateway polls: a line for each request would fill the log, and hide the causes in it.
POLLED: Final = ("/health", "/metrics", "/v1/models", "/version", "/openapi.json")
_QUIET: Final = "disable-access-log-for-endpoints"
_TLS: Final = (
    *("ssl-certfile", "ssl-keyfile", "ssl-ca-certs", "ssl-cert-reqs", "ssl-ciphers"),
    "enable-ssl-refresh",
)

_SIZES: Final = ("tensor-parallel-size", "pipeline-parallel-size", "data-parallel-size")
# Variables with our own settings and secrets, and those that a service manager sets for the gateway alone.
_OURS: Final = ("GATEWAY_", "NOTIFY_SOCKET", "LISTEN_", "WATCHDOG_", "FDSTORE")


def argv(launch: LaunchConfig, changes: Changes) -> list[str]:
    """Return program and arguments of a start.

    In `args` and `changes`: true is `--flag`, false is `--no-flag`, a list is one flag with several
    values, a mapping is JSON, and None takes the flag away, out of `command` too.
    `--tensor-parallel-size` follows from `gpus` where no parallel size is stated. `--port`, or
    `--uds` in its place, is always the configured one; `--host` is 127.0.0.1, or left out by
    `host: null`, for programs that do not know it. vLLM's flags for TLS are left out. `vllm serve` does
    not log what the gateway polls; `disable-access-log-for-endpoints: null` leaves that flag out, for a
    vLLM that does not know it.
    """
    overlay = merged(launch.args, changes.args)
    if len(launch.gpus) > 1 and not any(size in stated(launch, changes) for size in _SIZES):
        overlay["tensor-parallel-size"] = len(launch.gpus)
    if _is_vllm(launch.command) and _QUIET not in in_force(launch.command, overlay):
        overlay.setdefault(_QUIET, ",".join(POLLED))
    wanted = overlay.pop("host", HOST) is not None
    for name in ("port", "uds"):
        overlay.pop(name, None)
    if launch.socket is not None:
        overlay |= {"host": None, "port": None, "uds": str(launch.socket)}
    else:
        overlay |= {"host": HOST if wanted else None, "port": launch.port, "uds": None}
    overlay |= dict.fromkeys(_TLS)
    words = list(without(launch.command, overlay))
    for name, value in overlay.items():
        words += _written(name, value)
    return words


def stated(launch: LaunchConfig, changes: Changes) -> Mapping[str, JsonValue]:
    """Return the flags in force by their names: of `command`, `args` and the changes.

    Values in `command` are text, or True and False for those without one; several are a list.
    """
    return in_force(launch.command, launch.args, changes.args)


def environment(
    launch: LaunchConfig, base: Mapping[str, str], changes: Changes, marker: Mapping[str, str]
) -> dict[str, str]:
    """Return the environment of a start: `base` without the gateway's own variables, then what the start adds.

    `gpus` become CUDA_VISIBLE_DEVICES, counted as nvidia-smi does. Configured variables win over that, changes win
    over those, and the marker, by which a server is found again, wins over all.
    """
    inherited = {name: value for name, value in base.items() if not name.startswith(_OURS)}
    inherited.setdefault("PYTHONUNBUFFERED", "1")  # a killed process has written all its output
    if launch.gpus:
        inherited["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, launch.gpus))
        inherited.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    return {**inherited, **launch.env, **changes.env, **marker}


def _is_vllm(command: Sequence[str]) -> bool:
    """Return whether a command is `vllm serve`, by whatever path or wrapper."""
    words = [word.rsplit("/", 1)[-1] for word in command]
    return any(pair == ("vllm", "serve") for pair in pairwise(words))


def _written(name: str, value: JsonValue) -> list[str]:
    flag = f"--{name}"
    match value:
        case None:
            return []
        case True:
            return [flag]
        case False:
            return [f"--no-{name}"]
        case list():
            return [flag, *map(_text, value)] if value else []
        case _:
            text = _text(value)
            # argparse takes a word that begins with a dash for a flag, unless it is a number.
            return [f"{flag}={text}"] if is_flag(text) else [flag, text]


def _text(value: JsonValue) -> str:
    if isinstance(value, str):
        return value
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)
