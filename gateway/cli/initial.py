"""`init`: writes a settings file from servers that run, by what they say of themselves."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Annotated, Final

import typer

from gateway.cli.console import Exit, VerbError
from gateway.cli.settings import DEFAULT_FILE
from gateway.core.printable import count

TIMEOUT_S: Final = 5.0
_REFUSED: Final = frozenset({"http_401", "http_403"})
_AWAY: Final = frozenset({"refused", "unreachable", "timeout", "reset"})
_PLAIN: Final = re.compile(r"[A-Za-z][\w./-]*")  # what YAML reads as a text without quotes
_WORDS: Final = frozenset({"true", "false", "null", "yes", "no", "on", "off", "none", "auto"})
_HEAD: Final = "# Check it with `vllm-gateway check`. Every other setting has a safe default.\n"


@dataclass(frozen=True, slots=True)
class Server:
    """What a server that runs says of itself."""

    url: str
    models: tuple[str, ...]  # the names it serves its model by; the first is the main one
    version: str | None  # None: it is no vLLM


def init(
    urls: Annotated[list[str], typer.Option("--from", help="URL of a running server. Repeatable.")],
    file: Annotated[
        Path, typer.Option("--config", "-c", help="The settings file to write.")
    ] = DEFAULT_FILE,
    key_variable: Annotated[
        str | None,
        typer.Option("--api-key-env", help="Environment variable with the key of the servers."),
    ] = None,
) -> None:
    """Write a settings file from running servers: one pool for each model that they serve."""
    if file.exists():
        raise VerbError(f"{file} is there already", "name another file with -c, or remove it")
    api_key = None if key_variable is None else os.environ.get(key_variable)
    if key_variable is not None and not api_key:
        raise VerbError(f"the variable {key_variable} is not set", code=Exit.USAGE)
    servers = ask_all(urls, api_key, key_variable)
    with file.open("x", encoding="utf-8") as out:
        out.write(settings_of(servers, key_variable))
    models = ", ".join(dict.fromkeys(pool_name(server.models) for server in servers))
    print(f"{file}: {count(len(servers), 'server')}, model {models}")
    print(f"Next:\n  vllm-gateway check {file} --probe")
    print(f"  vllm-gateway keys create me -c {file}\n  vllm-gateway serve -c {file}")


def settings_of(servers: Sequence[Server], key_variable: str | None = None) -> str:
    """Return the text of a settings file in which servers of the same model are one pool. Pure."""
    pools: dict[str, list[Server]] = {}
    for server in servers:
        pools.setdefault(pool_name(server.models), []).append(server)
    names = {name: _aliases(name, of_pool) for name, of_pool in pools.items()}
    owners = Counter([*pools, *chain.from_iterable(names.values())])
    text = f"{_HEAD}version: 1\npools:\n"
    for name, of_pool in pools.items():
        text += f"  {_word(name)}: # the model name that clients use\n"
        if aliases := [each for each in names[name] if owners[each] == 1]:
            text += f"    aliases: [{', '.join(map(_word, aliases))}]\n"
        if left_out := [each for each in names[name] if owners[each] > 1]:
            told = ", ".join(map(_word, left_out))
            text += f"    # No aliases, as another pool has them, too: {told}\n"
        others = [each for each in of_pool if each.version is None]
        if others == of_pool:
            text += "    engine: openai # it is no vLLM: its load is not known\n"
        text += "    backends:\n"
        for server in of_pool:
            differs = server in others and others != of_pool
            text += _backend(server.url, key_variable, differs=differs)
    return text


def pool_name(models: Sequence[str]) -> str:
    """Return the name for clients of a model: the first that may be one; of a path, its last part."""
    valid = (each for each in models if _may_be_a_name(each))
    named = re.sub(r"[^A-Za-z0-9._:-]", "-", models[0].rstrip("/").rpartition("/")[2])
    return next(valid, named.lstrip("._:-")[:128] or "model")


def _may_be_a_name(model: str) -> bool:
    from gateway.config.names import MODEL_NAME  # pydantic takes as long to import as all the rest

    return re.match(MODEL_NAME, model) is not None


def _aliases(pool: str, servers: Sequence[Server]) -> list[str]:
    """Return the other names by which all of the servers have the model."""
    return [
        name
        for name in servers[0].models
        if name != pool
        and _may_be_a_name(name)
        and all(name in server.models for server in servers)
    ]


def _backend(url: str, key_variable: str | None, *, differs: bool) -> str:
    more = ["engine: openai"] if differs else []
    if key_variable is not None:
        more.append(f'api_key: "${{{key_variable}}}"')
    if not more:
        return f"      - {url}\n"
    return f"      - {{{', '.join([f'url: {_word(url)}', *more])}}}\n"


def _word(text: str) -> str:
    """Return a text as YAML reads it."""
    plain = _PLAIN.fullmatch(text) and text.lower() not in _WORDS
    return text if plain else json.dumps(text)


# --- asking ---------------------------------------------------------------------------------------


def ask_all(urls: Sequence[str], api_key: str | None, key_variable: str | None) -> list[Server]:
    """Ask every server at the same time, within 5 s.

    Raises:
        VerbError: one of them cannot be used; says which, and why. A file without it would mislead.
    """
    import asyncio

    import uvloop

    async def ask() -> list[Server | VerbError]:
        async with asyncio.TaskGroup() as group:
            asking = [
                group.create_task(_ask(url, api_key, key_variable)) for url in dict.fromkeys(urls)
            ]
        return [each.result() for each in asking]

    # asyncio's own loop does not tell why a host of several addresses could not be reached.
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        answers = runner.run(ask())
    if troubles := [each for each in answers if isinstance(each, VerbError)]:
        hints = dict.fromkeys(each.hint for each in troubles)
        raise VerbError("; ".join(map(str, troubles)), "; ".join([*hints, "nothing was written"]))
    return [each for each in answers if isinstance(each, Server)]


async def _ask(url: str, api_key: str | None, key_variable: str | None) -> Server | VerbError:
    """Return what a server says of itself, or why it cannot be used, and what to do."""
    from pydantic_core import PydanticCustomError

    from gateway.cli.preflight import why_not
    from gateway.config.urls import check_backend_url
    from gateway.pools.backend import Backend
    from gateway.watch.fetch import FetchError, Pages
    from gateway.wire.vllm import parse_models, parse_version

    try:
        backend = Backend("init", "b1", check_backend_url(url), api_key)
    except PydanticCustomError as error:
        return VerbError(f"--from: {error.message()}", "correct the URL, or leave it out")
    pages = Pages(backend)
    try:
        listed = parse_models(await pages.get("/v1/models", timeout_s=TIMEOUT_S))
        try:
            version = parse_version(await pages.get("/version", timeout_s=TIMEOUT_S))
        except FetchError:
            version = None
    except FetchError as error:
        where = f"{backend.url} /v1/models"
        if error.reason in _REFUSED:
            told = f"it rejects the key of {key_variable}" if api_key else "it wants an API key"
            return VerbError(
                f"{where}: {told}", "name the variable that holds its key with --api-key-env"
            )
        todo = "start it" if error.reason in _AWAY else "correct the URL"
        return VerbError(f"{where}: {why_not(backend, error.reason)}", f"{todo}, or leave it out")
    finally:
        pages.close()
    names = tuple(model.name for model in listed if model.parent is None)
    if not names:
        return VerbError(f"{backend.url} serves no model", "correct the URL, or leave it out")
    return Server(backend.url, names, version)
