"""Keep LoRA adapters loaded: those of the configuration, and those that a restart would lose.

vLLM forgets at a restart what was loaded at run time. What it held before is known from its model
list (`root` is the adapter's path), so it can be loaded again, and is verified in the new list.
"""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Final

import msgspec

from gateway.config.models import PoolConfig
from gateway.pools.table import Backend
from gateway.watch.fetch import FetchError, Pages

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


async def load(pages: Pages, name: str, path: str, *, timeout_s: float) -> None:
    """Have a backend load an adapter (`POST /v1/load_lora_adapter`). One that it has already is fine.

    Raises:
        AdapterError: it does not.
    Cancel: it may be loaded all the same.
    """
    body = msgspec.json.encode({"lora_name": name, "lora_path": path})
    try:
        status, reply = await pages.post("/v1/load_lora_adapter", body, timeout_s=timeout_s)
    except FetchError as error:
        raise AdapterError(f"the adapter {name} was not loaded: {error.reason}") from error
    said = reply.decode(errors="replace")[:_MOST_SHOWN]
    if status == HTTPStatus.OK or "already been loaded" in said:
        return
    if status == HTTPStatus.NOT_FOUND and "lora" not in said.lower():
        raise AdapterError(
            f"the adapter {name} was not loaded: the server cannot load adapters; start it with"
            " --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
        )
    raise AdapterError(f"the adapter {name} was not loaded ({status}): {said}")
