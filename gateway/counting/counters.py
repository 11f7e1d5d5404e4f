"""Who counts a pool's prompts: its tokenizer here, when there is one, else one of its backends.

It is the configured one, or that of the model which the gateway launches from a local folder.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

import msgspec
from msgspec import Raw, structs

from gateway.config.flags import in_force
from gateway.config.launched import model_of
from gateway.config.models import PoolConfig
from gateway.config.supervision import LaunchConfig
from gateway.core.errors import ConfigError
from gateway.core.types import Call, Endpoint, Route
from gateway.counting import ids
from gateway.counting.tokens import Asker, BackendCounter, LocalCounter, Made, off_loop, prepared
from gateway.pools.table import Backend
from gateway.wire.objects import fields_of, is_given

log = logging.getLogger("gateway.counting")

Answer = TypeVar("Answer")

_MOST_ASKED: Final = 3  # backends, one after the other: where one failed, the next may fail too

# Flags by which the engine takes another tokenizer or writes prompts in another way than the folder
# says, or reads its flags from elsewhere (vLLM 0.32).
_FOREIGN: Final = frozenset(
    {
        *("tokenizer", "tokenizer-mode", "tokenizer-revision", "skip-tokenizer-init"),
        *("chat-template", "chat-template-content-format", "default-chat-template-kwargs"),
        *("config", "hf-overrides"),
    }
)


class NobodyTold(Exception):
    """Backends that can count were silent, or are not there: they may tell a moment later."""


class PromptCounters:
    """The counters of all pools, made from one configuration.

    Raises:
        ConfigError: a configured tokenizer folder cannot be used.
    """

    def __init__(
        self,
        pools: Mapping[str, PoolConfig],
        open_asker: Callable[[Backend], Asker],
        *,
        deadline_s: float,
        before: PromptCounters | None = None,
    ) -> None:
        """Load the tokenizers; those of `before` are kept where no file of the folder has changed."""
        self._local: dict[str, LocalCounter | None] = {}
        self._stamps: dict[str, object] = {}  # of what each was made from
        for name, pool in pools.items():
            folder = pool.tokenizer or _launched_folder(pool)
            if folder is None:
                continue
            stamp = self._stamps[name] = (deadline_s, pool.tokenizer is None, _stamp(folder))
            if before is not None and before._stamps.get(name) == stamp:
                self._local[name] = before._local[name]
            elif pool.tokenizer is not None:
                self._local[name] = LocalCounter(folder, deadline_s=deadline_s)
            else:
                self._local[name] = _found_counter(name, folder, deadline_s)
        self._open_asker = open_asker
        self._deadline_s = deadline_s
        self._remote: dict[Backend, BackendCounter] = {}

    async def count(self, call: Call, route: Route, backends: Sequence[Backend]) -> int | None:
        """Return the exact length of the longest prompt in tokens; None when nobody can tell.

        Of several texts a backend is asked for the one of most bytes alone. `backends` are those that serve now;
        the least busy one is asked, and others while those that were asked are not there.

        Raises:
            NobodyTold: those who can were silent for too long, or not there.
        Cancel: nothing is held.
        """
        chat = await prepared(call)
        return None if chat is None else await self._count(chat, route, backends)

    async def count_without_tools(
        self, call: Call, route: Route, backends: Sequence[Backend]
    ) -> int | None:
        """Return the length of a prompt without its tools, where its server may leave them out.

        None where it may not, or nobody can tell. By `--exclude-tools-when-tool-choice-none` a vLLM (0.32) leaves
        out those that the model may not call; `/tokenize` counts them all the same.

        Raises:
            NobodyTold: as for `count`.
        Cancel: nothing is held.
        """
        chat = await prepared(call)
        bare = None if chat is None else await off_loop(chat, partial(_without_tools, chat))
        return None if bare is None else await self._count(bare, route, backends)

    async def _count(self, chat: Call, route: Route, backends: Sequence[Backend]) -> int | None:
        local = self._local.get(route.pool)
        if local is not None:
            tokens = await local.count(chat, route.served_model, window_tokens=route.widest_tokens)
            if tokens is not None:
                return tokens
        able, until = _able(backends, route)[:_MOST_ASKED], time.monotonic() + self._deadline_s
        for asked in able:
            with suppress(OSError):
                return await self._counter(asked).count(chat, asked.served_name(route))
            if time.monotonic() >= until:
                break
        if able:
            raise NobodyTold
        return None

    async def read(
        self, call: Call, route: Route, make: Callable[[Sequence[int]], Made], *, within_s: float
    ) -> Made | None:
        """Return what `make` makes of the token ids of the call's only prompt.

        None when the pool has no tokenizer here, or it cannot tell within `within_s`.
        Cancel: nothing is held.
        """
        local = self._local.get(route.pool)
        chat = None if local is None else await prepared(call)
        if local is None or chat is None:
            return None
        return await local.read(chat, make, within_s=within_s)

    async def text_of(
        self, tokens: Sequence[int], route: Route, backends: Sequence[Backend]
    ) -> str | None:
        """Return the text of tokens; None when none of these backends, of which one is asked, can tell.

        Cancel: nothing is held.
        """
        asked = next(iter(_able(backends, route)), None)
        if asked is None:
            return None
        return await self._counter(asked).text_of(tokens, asked.served_name(route))

    async def tokens_of(
        self, text: str, route: Route, backends: Sequence[Backend]
    ) -> ids.Tokens | None:
        """Return the tokens of a text; None when none of these backends tells.

        Cancel: nothing is held.
        """
        return await self._first_answer(route, backends, partial(ids.tokens_of, text=text))

    async def prompt_ids(
        self, call: Call, prompt_tokens: int | None, route: Route, backends: Sequence[Backend]
    ) -> ids.Prompt | None:
        """Return the token ids of the prompt of a Messages call; None when none of these backends tells.

        Cancel: nothing is held.
        """
        return await self._first_answer(
            route, backends, partial(ids.prompt_ids, call=call, prompt_tokens=prompt_tokens)
        )

    async def read_ids(
        self,
        call: Call,
        route: Route,
        backend: Backend,
        salt: Callable[[str | None], str] | None,
    ) -> list[int] | None:
        """Return the token ids of the prompt of a Responses call, which an engine reads for it; None: unknown.

        Raises:
            OSError: the backend failed meanwhile, or was silent.
        Cancel: nothing is held.
        """
        asker, name = self._counter(backend).asker, backend.served_name(route)
        return await ids.read_ids(asker, call, name, salt)

    async def _first_answer(
        self,
        route: Route,
        backends: Sequence[Backend],
        ask: Callable[[Asker, str], Awaitable[Answer | None]],
    ) -> Answer | None:
        """Return the answer of the first backend that has one; the least busy one is asked first."""
        for asked in _able(backends, route)[:_MOST_ASKED]:
            answer = await ask(self._counter(asked).asker, asked.served_name(route))
            if answer is not None:
                return answer
        return None

    async def tokenizer_info(self, backend: Backend) -> bytes:
        """Return what a backend says of its tokenizer: a JSON object.

        Raises:
            OSError: it says nothing in time.
        Cancel: nothing is held.
        """
        asker = self._counter(backend).asker
        return await asker.get("/tokenizer_info", timeout_s=self._deadline_s)

    def _counter(self, backend: Backend) -> BackendCounter:
        counter = self._remote.get(backend)
        if counter is None:
            counter = self._remote[backend] = BackendCounter(
                self._open_asker(backend), deadline_s=self._deadline_s
            )
        return counter

    def close(self) -> None:
        """Drop the connections to backends; a count that is under way comes to its end."""
        for counter in self._remote.values():
            counter.asker.close()


def _without_tools(chat: Call) -> Call | None:
    """Return a chat without the tools that the model may not call; None where there are none."""
    fields = fields_of(chat.body) if chat.endpoint is Endpoint.CHAT else {}
    given = is_given(fields.pop("tools", Raw()))
    if not given or bytes(fields.pop("tool_choice", b"")) != b'"none"':
        return None
    return structs.replace(chat, body=msgspec.json.encode(fields), fields=None, places=None)


def _able(backends: Sequence[Backend], route: Route) -> list[Backend]:
    """Return the backends to ask, the least busy first: each is a vLLM that has the route's adapter, if any."""
    name = route.adapter
    able = [each for each in backends if not each.plain and (name is None or name in each.models)]
    return sorted(able, key=lambda each: each.in_flight)


def _stamp(folder: Path) -> list[object]:
    """Return what changes whenever a file of a folder does."""
    stamp: list[object] = []
    for file in sorted(folder.rglob("*")):
        with suppress(OSError):
            found = file.stat()
            stamp.append((file, found.st_ino, found.st_size, found.st_mtime_ns))
    return stamp


def _found_counter(name: str, folder: Path, deadline_s: float) -> LocalCounter | None:
    """Return the counter of a tokenizer that nobody configured; None, with a warning, if it cannot be used."""
    try:
        return LocalCounter(folder, deadline_s=deadline_s)
    except ConfigError as error:
        log.warning(
            "%s: prompts are counted by its backends, for the tokenizer of its model cannot be used: %s",
            name,
            "; ".join(error.findings),
            extra={"event": "tokenizer_unusable"},
        )
        return None


def _launched_folder(pool: PoolConfig) -> Path | None:
    """Return the folder of the model that all launched backends of a pool serve, if it is here."""
    folders = {_model_folder(each.launch) for each in pool.backends if each.launch is not None}
    return folders.pop() if len(folders) == 1 else None


def _model_folder(launch: LaunchConfig) -> Path | None:
    """Return the folder whose tokenizer and chat template a launched server uses, if it is here."""
    flags = in_force(launch.command, launch.args)
    if not _FOREIGN.isdisjoint(flags):
        return None
    named = model_of(launch)
    folder = Path(named) if named is not None else None
    # Not `Path.is_file`: before Python 3.14 it raises where this user may not look.
    is_here = folder is not None and os.path.isfile(folder / "tokenizer.json")
    return folder if is_here else None
