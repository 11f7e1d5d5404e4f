"""vLLM's flags in what people wrote: their names, their values, and which are in force. Pure.

Flags are known by their long names with dashes; vLLM takes `--max_model_len` and `-tp` as well, so
both are understood.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from pydantic import JsonValue

Flags = Mapping[str, JsonValue]

UTILIZATION_FLAG: Final = "gpu-memory-utilization"
# The part of a GPU's memory that an engine takes: vllm/config/cache.py.
DEFAULT_UTILIZATION: Final = 0.92
MOST_UTILIZATION: Final = 0.95  # beyond it a GPU runs out at peaks that the trial run did not see
# utils/argparse_utils.py, `human_readable_int`: `32k` is 32000, `32K` is 32768.
_DECIMAL: Final = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY: Final = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_NUMBER: Final = re.compile(r"(\d+(?:\.\d+)?)([kKmMgGtT]?)")

# vllm/engine/arg_utils.py, vLLM 0.32: the short names of flags that decide how many GPUs it takes,
# and of those that a remedy, or the gateway's own address, may replace.
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
# Flags with several values, by name, and flags with none, by how their names begin (vLLM 0.32). Any other
# flag has one value.
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


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag in a command: its name, its values as written, and the words it spans."""

    name: str
    values: tuple[str, ...]
    span: range
    off: bool = False  # written as --no-name


def in_force(command: Sequence[str], *overlays: Flags) -> dict[str, JsonValue]:
    """Return the flags in force by their names: of the command, then of each overlay.

    Values in a command are text, or True and False for those without one; several are a list. None
    in an overlay takes a flag away.
    """
    found: dict[str, JsonValue] = {}
    for flag in flags(command):
        match flag.values:
            case ():
                found[flag.name] = not flag.off
            case (only,):
                found[flag.name] = only
            case _:
                found[flag.name] = list(flag.values)
    found |= merged(*overlays)
    return {name: value for name, value in found.items() if value is not None}


def whole_number(text: str) -> int:
    """Return the number of `32768`, `32k` (32000), `32K` (32768) or `25.6k`, as vLLM reads it.

    Unlike the gateway's own settings, where `32k` is 32768.

    Raises:
        ValueError: vLLM would not read it either.
    """
    match = _NUMBER.fullmatch(text.strip())
    number, suffix = match.groups() if match else ("", "")
    if match is None or ("." in number and suffix not in _DECIMAL):
        raise ValueError(f"{text} is not a number; write it like 32768, 32k (32000) or 32K (32768)")
    if suffix in _DECIMAL:
        return int(float(number) * _DECIMAL[suffix])
    return int(number) * _BINARY.get(suffix, 1)


def merged(*overlays: Flags) -> dict[str, JsonValue]:
    """Return the flags of all overlays by name, of which the last one wins; `no-x: true` is `x: false`."""
    found: dict[str, JsonValue] = {}
    for overlay in overlays:
        for written, value in overlay.items():
            name = flag_name(written)
            if name.startswith("no-") and isinstance(value, bool):
                name, value = name.removeprefix("no-"), not value
            found[name] = value
    return found


def flag_name(written: str) -> str:
    """Return the name of a flag as vLLM lists it: `max_model_len` is `max-model-len`."""
    head, dot, path = written.lstrip("-").partition(".")
    return head.replace("_", "-") + dot + path


def flags(command: Sequence[str]) -> Iterator[Flag]:
    """Go through the flags of a command."""
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
            while place < len(command) and len(values) < most and not is_flag(command[place]):
                values.append(command[place])
                place += 1
        yield Flag(name, tuple(values), range(begin, place), off)


def without(command: Sequence[str], names: Container[str]) -> Iterator[str]:
    """Return the words of a command without these flags and their values."""
    gone: set[int] = set()
    for flag in flags(command):
        if flag.name in names:
            gone.update(flag.span)
    return (word for place, word in enumerate(command) if place not in gone)


def is_flag(word: str) -> bool:
    """Return whether a program takes this word for a flag; numbers below zero are none."""
    return word.startswith("-") and not word[1:2].isdigit() and word != "-"


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
