"""What the command line of a launched server says of its model and adapters. Pure.

Source: vLLM 0.32, entrypoints/cli/serve.py (the positional model wins over `--model`) and
entrypoints/openai/cli_args.py, `LoRAParserAction` (`name=path`, or JSON with `name`).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Final

from pydantic import JsonValue

from gateway.config.flags import in_force, is_flag
from gateway.config.models import BackendConfig, PoolConfig
from gateway.config.supervision import LaunchConfig

_LORA_MODULES: Final = "lora-modules"


def model_of(launch: LaunchConfig) -> str | None:
    """Return the model that a command line names: a name on a hub or a folder. None: it names none."""
    words = [*launch.command, "--"]
    first = words[words.index("serve") + 1] if "serve" in launch.command else "--"
    if not is_flag(first):
        return first
    named = in_force(launch.command, launch.args).get("model")
    return named if isinstance(named, str) else None


def adapters_of(pool: PoolConfig) -> list[str]:
    """Return the names of the adapters that launched servers of a pool load by `--lora-modules`."""
    found: dict[str, None] = {}
    for backend in pool.backends:
        if backend.launch is not None:
            found |= dict.fromkeys(adapters_at(backend.launch))
    return [*found]


def adapters_at(launch: LaunchConfig) -> list[str]:
    """Return the names of the adapters that a server loads by `--lora-modules`."""
    return _names(in_force(launch.command, launch.args).get(_LORA_MODULES))


@dataclass(frozen=True, slots=True)
class AdapterLimits:
    """Which adapters a server accepts; None: not known."""

    most: int | None = None  # that it keeps in memory
    most_rank: int | None = None
    why_none: str = ""  # why it takes none at all


def adapter_limits(backend: BackendConfig) -> AdapterLimits:
    """Return which adapters a backend accepts: by its own settings, else its command line and vLLM's defaults.

    Source: vLLM 0.32, config/lora.py: rank 16, one adapter at a time, as many kept as used at a time.
    """
    launch = backend.launch
    if launch is None:
        return AdapterLimits(backend.max_cpu_loras)
    flags = in_force(launch.command, launch.args)
    if flags.get("enable-lora") is not True:
        if "serve" not in launch.command:  # a script, whose flags nobody sees here
            return AdapterLimits(backend.max_cpu_loras)
        return AdapterLimits(0, None, "its command line has no --enable-lora")
    at_a_time = _number(flags.get("max-loras")) or 1
    most = backend.max_cpu_loras or _number(flags.get("max-cpu-loras")) or at_a_time
    return AdapterLimits(most, _number(flags.get("max-lora-rank")) or 16)


def _number(value: JsonValue) -> int | None:
    return int(value) if isinstance(value, int | str) and str(value).isdecimal() else None


def _names(value: JsonValue) -> list[str]:
    modules = value if isinstance(value, list) else [value]
    return [name for each in modules if (name := _name(each))]


def _name(module: JsonValue) -> str | None:
    if isinstance(module, str):
        name, equals, _ = module.partition("=")
        if equals and "{" not in name:
            return name
        try:
            module = json.loads(module)
        except ValueError:
            return None  # vLLM will refuse it
    named = module.get("name") if isinstance(module, dict) else None
    return named if isinstance(named, str) else None
