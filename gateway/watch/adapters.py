"""Load and unload LoRA adapters on a backend, and choose those that a restarted server should have.

A restart of vLLM loses the adapters that were loaded at run time. Its model list from before gives their
paths (`root`), so they can be loaded again and checked in the new list.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from http import HTTPStatus
from typing import Any, Final

import msgspec

from gateway.config.launched import adapter_limits
from gateway.config.models import PoolConfig
from gateway.pools.table import Backend
from gateway.pools.unanswered import in_words
from gateway.watch.fetch import FetchError, Pages

_MOST_SHOWN: Final = 300  # characters of the server's answer


def wanted(
    pool: PoolConfig, held: Mapping[str, str], backend: str, out: Collection[str] = ()
) -> dict[str, str]:
    """Return the adapters that a restarted server should have, with their paths.

    If the configuration lists adapters, only those count: those that are pinned there and, while there is
    room, those that were loaded before. If all fit, the others too, except those with a number of replicas,
    which may be elsewhere. An adapter without a configured path is loaded from its earlier path.

    Args:
        pool: its settings.
        held: the adapters that the server had before its restart, with their paths.
        backend: its name in the pool.
        out: adapters that an operator keeps away from it.
    """
    if pool.adapters == "auto":
        return {name: path for name, path in held.items() if name not in out}
    listed = [each for each in pool.adapters if each.name not in out]
    paths = {each.name: each.path or held.get(each.name) for each in listed}
    known = {name: path for name, path in paths.items() if path is not None}
    limits = [adapter_limits(each) for each in pool.backends if each.name == backend]
    most = limits[0].most if limits else None
    pinned = {each.name for each in listed if backend in each.pin}
    first = sorted(known, key=lambda name: (name not in pinned, name not in held))
    kept = pinned | held.keys()
    if most is None or len(known) <= most:
        kept |= {each.name for each in listed if each.replicas is None}
    return {name: known[name] for name in first[:most] if name in kept}


def held_by(backend: Backend) -> dict[str, str]:
    """Return the adapters that a backend lists, with the paths that it reports."""
    return {
        name: model.root
        for name, model in backend.models.items()
        if model.parent is not None and model.root is not None
    }


class AdapterError(Exception):
    """An adapter could not be loaded or unloaded; the message is for people.

    `refused`: the server refused it; started anew, maybe with other flags, it may do it. `fatal`: the server may be
    dying of it, as it did not answer, or answered 500 as it does when its engine has died.
    """

    def __init__(self, message: str, *, refused: bool = False, fatal: bool = False) -> None:
        super().__init__(message)
        self.refused = refused
        self.fatal = fatal


async def load(pages: Pages, name: str, path: str, *, timeout_s: float) -> None:
    """Have a backend load an adapter (`POST /v1/load_lora_adapter`). One that it has already is fine.

    Raises:
        AdapterError: it was not loaded.
    Cancel: it may be loaded all the same.
    """
    body = {"lora_name": name, "lora_path": path}
    status, message = await _order(
        pages, "load", body, f"the adapter {name} was not loaded", timeout_s
    )
    if status != HTTPStatus.OK and "already been loaded" not in message:
        failed = f"the adapter {name} was not loaded ({status}): {message}"
        fatal = status == HTTPStatus.INTERNAL_SERVER_ERROR
        raise AdapterError(failed, refused=True, fatal=fatal)


async def unload(pages: Pages, name: str, *, timeout_s: float) -> None:
    """Have a backend unload an adapter. One that it does not have is fine.

    Raises:
        AdapterError: it was not unloaded.
    Cancel: it may be unloaded all the same.
    """
    failed = f"the adapter {name} was not unloaded"
    status, message = await _order(pages, "unload", {"lora_name": name}, failed, timeout_s)
    if status != HTTPStatus.OK and "cannot be found" not in message:
        raise AdapterError(f"{failed} ({status}): {message}", refused=True)


async def _order(
    pages: Pages, verb: str, body: Mapping[str, str], failed: str, timeout_s: float
) -> tuple[int, str]:
    """Return the status of the reply to an order, and its message."""
    path = f"/v1/{verb}_lora_adapter"
    try:
        status, reply = await pages.post(path, msgspec.json.encode(body), timeout_s=timeout_s)
    except FetchError as error:
        raise AdapterError(f"{failed}: {in_words(error.reason)}", fatal=True) from error
    message = _message(reply)
    if status == HTTPStatus.NOT_FOUND and "lora" not in message.lower():
        raise AdapterError(
            f"{failed}: the server cannot do this while it runs; start it with --enable-lora and"
            " VLLM_ALLOW_RUNTIME_LORA_UPDATING=1",
            refused=True,
        )
    return status, message


def _message(reply: bytes) -> str:
    """Return the message of an error reply, or the text of another reply."""
    try:
        decoded: Any = msgspec.json.decode(reply)
        return str(decoded["error"]["message"])[:_MOST_SHOWN]
    except (msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError):
        return reply.decode(errors="replace")[:_MOST_SHOWN]
