"""Loading and unloading of LoRA adapters while a simulated server runs."""

from __future__ import annotations

import asyncio
import re
from typing import Any, Final

from gateway.sim.errors import SimError, engine_dead
from gateway.sim.state import SimState

LOAD: Final = "/v1/load_lora_adapter"
PATHS: Final = (LOAD, "/v1/unload_lora_adapter")

_RANK: Final = re.compile(r"rank-(\d+)")


async def order(path: str, body: dict[str, Any], state: SimState) -> str:
    """POST to one of `PATHS`. A load takes as long as the configuration says, and stops the engines.

    One from a "deadly" path kills them.
    """
    if state.dead:
        raise engine_dead()
    if path != LOAD:
        return _unload(body, state)
    _check(body, state)
    if seconds := state.config.adapter_load_s:
        for driver in state.drivers:
            driver.freeze(frozen=True)
        try:
            await asyncio.sleep(seconds)
        finally:
            for driver in state.drivers:
                driver.freeze(frozen=False)
    if "deadly" in body["lora_path"]:
        state.die()
    if state.dead:  # of this load, or of anything else meanwhile
        raise engine_dead()
    name = body["lora_name"]
    state.loaded[name] = body["lora_path"]
    return f"Success: LoRA adapter '{name}' added successfully."


def _check(body: dict[str, Any], state: SimState) -> None:
    """Refuse what vLLM refuses. Every path exists, unless it has "missing" in it; "rank-64" is its rank."""
    name, path = body.get("lora_name"), body.get("lora_path")
    if not name or not path:
        raise _error(400, "Both 'lora_name' and 'lora_path' must be provided.")
    if name == state.config.model:
        raise _error(400, f"The lora adapter '{name}' conflicts with a served base model.")
    if name in state.loaded and not body.get("load_inplace"):
        says = f"The lora adapter '{name}' has already been loaded."
        advice = "If you want to load the adapter in place, set 'load_inplace' to True."
        raise _error(400, f"{says} {advice}")
    if "missing" in path:
        raise _error(404, f"Loading lora {name} failed: No adapter found for {path}")
    rank, most = _RANK.search(path), state.config.max_lora_rank
    if rank is not None and int(rank[1]) > most:
        says = f"LoRA rank {rank[1]} is greater than max_lora_rank {most}."
        raise SimError(500, f"Call to add_lora method failed: {says}", kind="InternalServerError")


def _unload(body: dict[str, Any], state: SimState) -> str:
    name = body.get("lora_name")
    if name not in state.loaded:
        raise _error(404, f"The lora adapter '{name}' cannot be found.")
    del state.loaded[name]
    return f"Success: LoRA adapter '{name}' removed successfully."


def _error(status: int, message: str) -> SimError:
    return SimError(status, message, kind="NotFoundError" if status == 404 else "InvalidUserInput")
