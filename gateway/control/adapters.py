"""Keep LoRA adapters loaded: those of the configuration, and those that a restart would lose.

vLLM forgets at a restart what was loaded at run time. What it held before is known from its model
list (`root` is the adapter's path), so it can be loaded again, and is verified in the new list.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Final

import httpx2
import msgspec

from gateway.config.models import PoolConfig
from gateway.control.fetch import reason_of
from gateway.pools.table import Backend

_MOST_SHOWN: Final = 300  # characters of the server's answer


def wanted(pool: PoolConfig, held: Mapping[str, str]) -> dict[str, str]:
    """Return the adapters that a backend of the pool should hold, with their paths.

    `held` are those it had before a restart. With a list in the configuration only its names count;
    one without a path is loaded from where it was.
    """
    if pool.adapters == "auto":
        return dict(held)
    paths = {each.name: each.path or held.get(each.name) for each in pool.adapters}
    return {name: path for name, path in paths.items() if path is not None}


def held_by(backend: Backend) -> dict[str, str]:
    """Return the adapters that a backend lists, with the paths it tells."""
    return {
        name: model.root
        for name, model in backend.models.items()
        if model.parent is not None and model.root is not None
    }


class AdapterError(Exception):
    """An adapter could not be loaded; the message is for people."""


async def load(client: httpx2.AsyncClient, name: str, path: str, *, timeout_s: float) -> None:
    """Have a backend load an adapter (`POST /v1/load_lora_adapter`). One that it has already is fine.

    Raises:
        AdapterError: it does not.
    Cancel: it may be loaded all the same.
    """
    body = msgspec.json.encode({"lora_name": name, "lora_path": path})
    try:
        async with asyncio.timeout(timeout_s):
            reply = await client.post(
                "/v1/load_lora_adapter",
                content=body,
                headers={"content-type": "application/json"},
                timeout=httpx2.Timeout(None, connect=timeout_s / 2),
            )
    except (httpx2.HTTPError, httpx2.InvalidURL, TimeoutError) as error:
        raise AdapterError(f"the adapter {name} was not loaded: {reason_of(error)}") from error
    said = reply.text[:_MOST_SHOWN]
    if reply.status_code == httpx2.codes.OK or "already been loaded" in said:
        return
    if reply.status_code == httpx2.codes.NOT_FOUND and "lora" not in said.lower():
        raise AdapterError(
            f"the adapter {name} was not loaded: the server has no such path; start it with"
            " --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
        )
    raise AdapterError(f"the adapter {name} was not loaded ({reply.status_code}): {said}")
