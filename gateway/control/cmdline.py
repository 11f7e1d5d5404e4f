"""The command line and the environment of a vLLM that the gateway launches. Pure.

Flags are known by their long names with dashes; vLLM takes `--max_model_len` and `-tp` as well, so
both are understood in what people wrote. What is stated twice counts once: changes of a start win
over `args`, and those over `command`. The address is always ours: what listens there is what the
gateway talks to, and vLLM without `--host` listens on every interface.
"""

from __future__ import annotations

import json
import re
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from pydantic import JsonValue

from gateway.config.supervision import LaunchConfig
from gateway.control.launchers.launcher import Changes

HOST: Final = "127.0.0.1"

# vllm/engine/arg_utils.py, vLLM 0.32: the short names of flags that decide how many GPUs it takes,
# and of those that a remedy or the address may replace.
_SHORT: Final = {
    "-tp": "tensor-parallel-size",
    "-pp": "pipeline-parallel-size",
    "-dp": "data-parallel-size",
    "-dpl": "data-parallel-size-local",
    "-dcp": "decode-context-parallel-size",
    "-pcp": "prefill-context-parallel-size",
    "-ep": "enable-expert-parallel",
    "-q": "quantization",
    "-cc": "compilation-config",
    "-sc": "speculative-config",
}
# Flags with several values after them, and those with none, by their names or how these begin (vLLM
# 0.32). A flag that is in neither has one value.
_LISTS: Final = frozenset(
    {
        "allowed-media-domains",
        "api-key",
        "cudagraph-capture-sizes",
        "kv-cache-dtype-skip-layers",
        "logits-processors",
        "lora-modules",
        "lora-target-modules",
        "numa-bind-cpus",
        "numa-bind-nodes",
        "served-model-name",
    }
)
_SWITCH: Final = re.compile(
    r"(enable|disable|enforce|trust|allow|skip|use|return)-(?!access-log-for-endpoints)"
    r"|(async-scheduling|fully-sharded-loras|headless|grpc|tokens-only|language-model-only)$"
)
_SIZES: Final = ("tensor-parallel-size", "pipeline-parallel-size", "data-parallel-size")
# Our own settings and secrets, and what a service manager tells the gateway alone.
_OURS: Final = ("GATEWAY_", "NOTIFY_SOCKET", "LISTEN_", "WATCHDOG_", "FDSTORE")


@dataclass(frozen=True, slots=True)
class _Flag:
    """A flag in a command: its name, its values as written, and the words it spans."""

    name: str
    values: tuple[str, ...]
    span: range
    off: bool = False  # written as --no-name


def argv(launch: LaunchConfig, changes: Changes) -> list[str]:
    """Return program and arguments of a start.

    In `args` and `changes`: true is `--flag`, false is `--no-flag`, a list is one flag with several
    values, a mapping is JSON, and None takes the flag away, out of `command` too.
    `--tensor-parallel-size` follows from `gpus` where no parallel size is stated. `--port` is
    always the configured one; `--host` is 127.0.0.1, or left out by `host: null`, for programs that
    do not know it.
    """
    overlay = _overlay(launch, changes)
    if len(launch.gpus) > 1 and not any(size in stated(launch, changes) for size in _SIZES):
        overlay["tensor-parallel-size"] = len(launch.gpus)
    wanted = overlay.pop("host", HOST) is not None
    overlay.pop("port", None)
    overlay |= {"host": HOST if wanted else None, "port": launch.port}
    words = list(_without(launch.command, overlay))
    for name, value in overlay.items():
        words += _written(name, value)
    return words


def stated(launch: LaunchConfig, changes: Changes) -> Mapping[str, JsonValue]:
    """Return the flags in force by their names: of `command`, `args` and the changes.

    Values in `command` are text, or True and False for those without one; several are a list.
    """
    flags: dict[str, JsonValue] = {}
    for flag in _flags(launch.command):
        match flag.values:
            case ():
                flags[flag.name] = not flag.off
            case (only,):
                flags[flag.name] = only
            case _:
                flags[flag.name] = list(flag.values)
    for name, value in _overlay(launch, changes).items():
        flags.pop(name, None)
        if value is not None:
            flags[name] = value
    return flags


def environment(
    launch: LaunchConfig, base: Mapping[str, str], changes: Changes, marker: Mapping[str, str]
) -> dict[str, str]:
    """Return the environment of a start: `base` without what is the gateway's own, then ours.

    `gpus` become CUDA_VISIBLE_DEVICES, counted as nvidia-smi does. The configured variables win
    over that, changes over those, and the marker, by which a server is found again, over all.
    """
    inherited = {name: value for name, value in base.items() if not name.startswith(_OURS)}
    inherited.setdefault("PYTHONUNBUFFERED", "1")  # a killed process has written what it said
    if launch.gpus:
        inherited["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, launch.gpus))
        inherited.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    return {**inherited, **launch.env, **changes.env, **marker}


# --- flags ----------------------------------------------------------------------------------------


def flag_name(written: str) -> str:
    """Return the name of a flag as vLLM lists it: `max_model_len` is `max-model-len`."""
    head, dot, path = written.lstrip("-").partition(".")
    return head.replace("_", "-") + dot + path


def _overlay(launch: LaunchConfig, changes: Changes) -> dict[str, JsonValue]:
    overlay: dict[str, JsonValue] = {}
    for written, value in (*launch.args.items(), *changes.args.items()):
        name = flag_name(written)
        if name.startswith("no-") and isinstance(value, bool):
            name, value = name.removeprefix("no-"), not value
        overlay[name] = value
    return overlay


def _flags(command: Sequence[str]) -> Iterator[_Flag]:
    place = 1  # the first word is the program
    while place < len(command):
        name, glued = _flag_at(command[place])
        begin, place = place, place + 1
        if name is None:
            continue
        off = name.startswith("no-")
        if off:
            name = name.removeprefix("no-")
        values = [] if glued is None else [glued]
        if glued is None and not off and not _SWITCH.match(name):
            most = len(command) if name in _LISTS else 1
            while place < len(command) and len(values) < most and not _is_flag(command[place]):
                values.append(command[place])
                place += 1
        yield _Flag(name, tuple(values), range(begin, place), off)


def _flag_at(word: str) -> tuple[str | None, str | None]:
    """Return the flag's name, and the value that is glued to it by `=`."""
    written, equals, value = word.partition("=")
    if written in _SHORT:
        name = _SHORT[written]
    elif written.startswith("--") and len(written) > len("--"):
        name = flag_name(written)
    else:
        return None, None
    return name, value if equals else None


def _is_flag(word: str) -> bool:
    return word.startswith("-") and not word[1:2].isdigit() and word != "-"


def _without(command: Sequence[str], names: Container[str]) -> Iterator[str]:
    gone: set[int] = set()
    for flag in _flags(command):
        if flag.name in names:
            gone.update(flag.span)
    return (word for place, word in enumerate(command) if place not in gone)


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
            return [f"{flag}={text}"] if _is_flag(text) else [flag, text]


def _text(value: JsonValue) -> str:
    if isinstance(value, str):
        return value
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)
