"""What the command line of a launched server says of its model and adapters. Pure.

Source: vLLM 0.32, entrypoints/cli/serve.py (the model's word wins over `--model`) and
entrypoints/openai/cli_args.py, `LoRAParserAction` (`name=path`, or JSON with `name`).
"""

from __future__ import annotations

import json
from typing import Final

from pydantic import JsonValue

from gateway.config.flags import in_force, is_flag
from gateway.config.models import PoolConfig
from gateway.config.supervision import LaunchConfig

_LORA_MODULES: Final = "lora-modules"


def model_of(launch: LaunchConfig) -> str | None:
    """Return the model that a server is told to serve: a name on a hub or a folder. None: not said."""
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
            flags = in_force(backend.launch.command, backend.launch.args)
            found |= dict.fromkeys(_names(flags.get(_LORA_MODULES)))
    return [*found]


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
