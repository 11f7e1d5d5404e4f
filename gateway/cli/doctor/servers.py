"""What is asked of the backends: version, metrics, and flags that work against the gateway."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Iterator
from typing import Final

import uvloop

from gateway.cli.doctor.advisories import mending, open_in
from gateway.cli.doctor.cached import cache_findings
from gateway.cli.doctor.clocks import of_date
from gateway.cli.doctor.findings import Finding, ok
from gateway.cli.doctor.onredis import redis_findings
from gateway.cli.preflight import backends_of
from gateway.config.flags import merged
from gateway.config.models import BackendConfig, Config
from gateway.pools.backend import Backend
from gateway.pools.unanswered import in_words
from gateway.watch.fetch import FetchError, Pages
from gateway.wire.vllm import parse_version

_TIMEOUT_S: Final = 3.0
_APART: Final = "lines of their logs, and spans of traces, do not fit together"
_RUNNING: Final = b"vllm:num_requests_running"


def server_findings(config: Config) -> list[Finding]:
    """Ask Redis and every backend of the settings at the same time, once; return what is found, in their order."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_all(config))


async def _all(config: Config) -> list[Finding]:
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(
                _look(backend, launched=each.launch is not None), name=f"doctor {backend.id}"
            )
            for name, pool in config.pools.items()
            for each, backend in backends_of(name, pool)
        ]
        if config.redis is not None:
            url = config.redis.get_secret_value()
            tasks.append(group.create_task(redis_findings(url), name="doctor redis"))
    found = [finding for task in tasks for finding in task.result()]
    for name, pool in config.pools.items():
        for each in pool.backends:
            found += flag_findings(f"{name}/{each.name}", each)
    return found


async def _look(backend: Backend, *, launched: bool) -> list[Finding]:
    if backend.plain:
        return []
    pages = Pages(backend)
    try:
        version = parse_version(await pages.get("/version", timeout_s=_TIMEOUT_S))
        metrics = await pages.get("/metrics", timeout_s=_TIMEOUT_S)
        date = await pages.date("/health", timeout_s=_TIMEOUT_S)
        clock = [*of_date(date, backend.id, "note", _APART)]  # now: what follows may take long
        cached = [] if launched else await cache_findings(backend.id, pages)
    except FetchError as error:
        return [
            Finding(verdict="skipped", about="backend", told=f"{backend.id} does not answer: {in_words(error.reason)}",
                    change="start it, and run this again")
        ]  # fmt: skip
    except ValueError:
        return [Finding(verdict="wrong", about="backend", told=f"{backend.id} does not answer as vLLM does",
                        change="correct its url, or set `engine: openai` on its pool")]  # fmt: skip
    finally:
        pages.close()
    return [
        *version_findings(backend.id, version or ""),
        *metrics_findings(backend.id, metrics),
        *clock,
        *cached,
    ]


def version_findings(backend: str, version: str) -> Iterator[Finding]:
    """Yield the advisories that a backend's version has open."""
    if known := open_in(version):
        yield Finding(
            verdict="wrong", about="advisories",
            told=f"{backend} runs vLLM {version}, which has {len(known)} known advisories: {'; '.join(known[-3:])}",
            change=f"pip install 'vllm>={mending(version)}'",
        )  # fmt: skip
    else:
        yield ok(
            "advisories",
            f"{backend} runs vLLM {version or 'of an unknown version'}: no known advisory",
        )


def metrics_findings(backend: str, metrics: bytes) -> Iterator[Finding]:
    """Yield whether a backend's metrics tell its load."""
    if _RUNNING not in metrics:
        yield Finding(
            verdict="wrong", about="log_stats",
            told=f"{backend} does not report its load, so the gateway sends it little",
            change="start it without --disable-log-stats",
        )  # fmt: skip


def flag_findings(backend: str, config: BackendConfig) -> Iterator[Finding]:
    """Yield flags of a launched server that work against the gateway, and those that are missing."""
    launch = config.launch
    if launch is None:
        return
    words = shlex.join(launch.command).replace("_", "-").lower().split()
    given = {word.split("=", 1)[0].removeprefix("--") for word in words if word.startswith("--")}
    stated = {name.lower(): value for name, value in merged(launch.args).items()}
    given -= {name for name, value in stated.items() if value is None or value is False}
    given |= {name for name, value in stated.items() if value is not None and value is not False}
    if "disable-log-stats" in given:
        yield Finding(
            verdict="wrong", about="log_stats", told=f"{backend} is started without metrics of its load",
            change="remove --disable-log-stats from its `launch`",
        )  # fmt: skip
    if "enable-prompt-tokens-details" not in given:
        yield Finding(
            verdict="note", about="prompt_tokens_details",
            told=f"{backend} does not tell how many prompt tokens were cached, so usage and routing only guess",
            change="args: {enable-prompt-tokens-details: true}",
        )  # fmt: skip
