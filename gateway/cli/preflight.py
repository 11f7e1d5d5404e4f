"""`check --probe`: does what the file says fit what the backends say, and does the shared store answer?

Every backend is asked at the same time, once, with a deadline. Nothing is changed and no request
is sent to a model.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import uvloop

from gateway.config.findings import Finding, KeyPath, Remark, warning
from gateway.config.load import Loaded, placed
from gateway.config.models import BackendConfig, PoolConfig
from gateway.core.aio import SystemClock
from gateway.pools.backend import Backend
from gateway.pools.configured import configure, identify
from gateway.pools.unanswered import in_words
from gateway.store.shared import StoreUnavailable
from gateway.watch.fetch import FetchError, Pages
from gateway.wire.vllm import parse_models, parse_version

TIMEOUT_S: Final = 2.0
_AGAIN_S: Final = 0.3
_OF_SOCKETS: Final = {
    "refused": "nothing listens on the socket",
    "unreachable": "cannot connect; may this user write to the socket?",
}
_NOT_RUNNING: Final = frozenset({"refused", "unreachable"})  # nothing listens there, no socket


def why_not(backend: Backend, reason: str) -> str:
    """Return in plain words why a backend could not be asked: `FetchError.reason`."""
    if backend.socket is not None and reason in _OF_SOCKETS:
        return _OF_SOCKETS[reason]
    return f"no answer within {TIMEOUT_S:g} s" if reason == "timeout" else in_words(reason)


@dataclass(slots=True)
class _Visit:
    """One backend and what it told; `problem` is the closed word of what failed, and where."""

    path: KeyPath
    backend: Backend
    launched: bool  # the gateway starts it
    problem: str = ""
    not_running: bool = False  # and need not: `serve` will start it

    async def make(self) -> None:
        pages = Pages(self.backend)
        step = "/health"
        try:
            if not self.backend.plain:  # others need not have it
                await pages.get(step, timeout_s=TIMEOUT_S)
            step = "/v1/models"
            models = parse_models(await pages.get(step, timeout_s=TIMEOUT_S))
            self.backend.models = {model.name: model for model in models}
            identify(self.backend)
            if self.backend.plain:
                return
            step = "/version"
            self.backend.version = parse_version(await pages.get(step, timeout_s=TIMEOUT_S))
        except FetchError as error:
            self.not_running = self.launched and error.reason in _NOT_RUNNING
            if step != "/version":  # some servers do not tell it
                self.problem = f"{step}: {why_not(self.backend, error.reason)}"
        except ValueError:
            self.problem = f"{step}: {in_words('garbage')}"
        finally:
            pages.close()

    def told(self) -> str:
        """Return the visit in a few words: `qwen/b1 ok vLLM 0.11.0`."""
        if self.not_running:
            return f"{self.backend.id} not running, `serve` starts it"
        if self.problem:
            return f"{self.backend.id} {self.problem}"
        if self.backend.base_model is None:  # a finding tells which it serves instead
            return f"{self.backend.id} does not serve the model"
        version = self.backend.version
        return f"{self.backend.id} ok" + (f" vLLM {version}" if version else "")


def preflight(loaded: Loaded, file: Path) -> tuple[list[str], list[Finding]]:
    """Ask every backend of a configuration.

    Returns:
        What each one said in a few words, and the findings, at their places in the file.
    """
    # asyncio's own loop does not tell why a host of several addresses could not be reached.
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_preflight(loaded, file))


async def _preflight(loaded: Loaded, file: Path) -> tuple[list[str], list[Finding]]:
    visits: dict[str, list[_Visit]] = {
        name: list(_visits(name, pool)) for name, pool in loaded.config.pools.items()
    }
    async with asyncio.TaskGroup() as group:
        for visit in (each for of_pool in visits.values() for each in of_pool):
            group.create_task(visit.make(), name=f"preflight {visit.backend.id}")
    remarks = [
        remark
        for name, pool in loaded.config.pools.items()
        for remark in _compare(name, pool, visits[name])
    ]
    words = [visit.told() for of_pool in visits.values() for visit in of_pool]
    if loaded.config.redis is not None:
        keys = loaded.config.keys
        shared = keys is not None and keys.shared
        trouble = await _trouble(loaded.config.redis.get_secret_value(), lists=shared)
        words.append(f"redis {trouble or 'ok'}")
        if trouble:
            message = f"the Redis does not answer: {trouble}"
            hint = "`serve` starts without it, and restarts no backend until it answers"
            remarks.append(Remark(("redis",), "redis-unreachable", message, hint))
    return words, [placed(remark, loaded, file) for remark in remarks]


async def _trouble(url: str, *, lists: bool) -> str:
    """Return why the Redis at a URL cannot be used as `serve` would; empty: it can."""
    from gateway.store.onredis import redis_store

    try:
        store, told = redis_store(url, SystemClock()), ""
    except ValueError as error:  # which is a finding already
        return str(error)
    ends_at = asyncio.get_running_loop().time() + TIMEOUT_S
    try:
        # A call's own budget may be over before names are looked up and TLS is agreed.
        while asyncio.get_running_loop().time() < ends_at:
            try:
                await store.try_rights(lists=lists)
                return ""
            except StoreUnavailable as error:
                told = str(error)
            await asyncio.sleep(_AGAIN_S)
        return told
    finally:
        await store.close()


def backends_of(name: str, pool: PoolConfig) -> Iterator[tuple[BackendConfig, Backend]]:
    """Yield each backend of a pool: as the settings have it, and as it can be asked."""
    for config in pool.backends:
        key = None if config.api_key is None else config.api_key.get_secret_value()
        backend = Backend(name, config.name, config.url, key)
        configure(backend, pool, config, None)
        yield config, backend


def _visits(name: str, pool: PoolConfig) -> Iterator[_Visit]:
    for place, (config, backend) in enumerate(backends_of(name, pool)):
        yield _Visit(("pools", name, "backends", place), backend, config.launch is not None)


def _compare(name: str, pool: PoolConfig, visits: list[_Visit]) -> Iterator[Remark]:
    """Yield where the file and the backends of one pool, or these among each other, differ."""
    reached = [visit for visit in visits if not visit.problem]
    for visit in visits:
        backend = visit.backend
        if visit.not_running:
            continue
        if visit.problem:
            message = f"{backend.name} ({backend.url}) {visit.problem}"
            yield Remark(visit.path, "backend-unreachable", message)
        elif backend.base_model is None:
            serves = ", ".join(backend.models) or "nothing"
            yield Remark(
                visit.path,
                "model-missing",
                f"{backend.name} does not serve `{pool.served_model or name}`; it serves {serves}",
                "set served_model, or start vLLM with --served-model-name",
            )
    known = {v.backend.name: v.backend.base_model for v in reached if v.backend.base_model}
    if len(set(known.values())) > 1:
        each = ", ".join(f"{backend} serves `{model}`" for backend, model in known.items())
        yield warning(
            ("pools", name, "backends"),
            "model-mismatch",
            f"the backends of `{name}` serve different models: {each}",
            "if it is the same model, give all of them the same --served-model-name",
        )
    yield from _windows(name, pool, reached)
    if pool.adapters != "auto":
        for place, adapter in enumerate(pool.adapters):
            without = [v.backend.name for v in reached if adapter.name not in v.backend.models]
            if without:
                yield warning(
                    ("pools", name, "adapters", place),
                    "adapter-missing",
                    f"{', '.join(without)} does not have the adapter `{adapter.name}`",
                )


def _windows(name: str, pool: PoolConfig, reached: list[_Visit]) -> Iterator[Remark]:
    windows = {
        visit.backend.name: visit.backend.window_tokens
        for visit in reached
        if visit.backend.window_tokens is not None
    }
    if not windows:
        return
    largest = max(windows, key=lambda backend: windows[backend])
    if len(set(windows.values())) > 1:
        each = ", ".join(f"{backend} {window}" for backend, window in windows.items())
        yield warning(
            ("pools", name, "backends"),
            "context-mismatch",
            f"the context windows of `{name}` differ: {each}",
            f"what needs more than {min(windows.values())} tokens goes to the larger ones alone",
        )
    if pool.max_context is not None and pool.max_context > windows[largest]:
        yield warning(
            ("pools", name, "max_context"),
            "context-mismatch",
            f"max_context {pool.max_context} is more than {largest} reports ({windows[largest]})",
            f"requests above {windows[largest]} tokens are refused; use `auto`",
        )
