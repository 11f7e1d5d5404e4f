"""The keys of a settings file, as the command line opens them: in a file, or on the Redis that gateways share."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

import typer

from gateway.cli.console import Exit, VerbError
from gateway.cli.settings import usable

if TYPE_CHECKING:
    from gateway.access.keystore import KeyStore
    from gateway.access.records import KeyRecord
    from gateway.config.models import Config
    from gateway.config.process import KeysConfig

T = TypeVar("T")

_OPTIONS: Final = {"name": "NAME", "limits": "--limit", "addresses": "--address"}
_SECTIONS: Final = ("keys", "tiers", "redis")


class KeyDesk:
    """Asks the store of a settings file, which may be wrong elsewhere."""

    def __init__(self, file: Path) -> None:
        from gateway.config.load import check_file

        checked = check_file(file)
        wrong = [
            each
            for each in checked.findings
            if each.severity.value == "error" and each.path[:1] in [(name,) for name in _SECTIONS]
        ]
        if checked.partial is None or wrong:
            usable(file)
            raise typer.Exit(Exit.INVALID_CONFIG)
        config = checked.partial.config
        if config.keys is None:
            hint = "to use keys, write `keys: {file: keys.yaml}`"
            raise VerbError(
                f"authentication is off in {file} (`keys: none`)", hint, Exit.INVALID_CONFIG
            )
        self.file = file
        self.config: Config = config
        self.keys: KeysConfig = config.keys

    def ask(self, call: Callable[[KeyStore], Awaitable[T]]) -> T:
        """Return what a call of the store does.

        Raises:
            VerbError: it does not.
        """
        import asyncio

        from gateway.access.keyerrors import BadSettings, KeyStoreError, NoSuchKey
        from gateway.store.shared import StoreUnavailable

        async def asked() -> T:
            async with self._store() as store:
                return await call(store)

        try:
            return asyncio.run(asked())
        except NoSuchKey as error:
            hint = f"see `vllm-gateway keys list -c {self.file}`"
            raise VerbError(str(error), hint, Exit.NOT_FOUND) from None
        except BadSettings as error:
            told = "; ".join(_in_words_of_options(*each) for each in error.wrong)
            raise VerbError(told, code=Exit.USAGE) from None
        except KeyStoreError as error:
            raise VerbError(str(error)) from None
        except StoreUnavailable as error:
            raise VerbError(f"the Redis that gateways share does not answer: {error}") from None

    def of_file(self, file: Path | None) -> Sequence[KeyRecord]:
        """Return the keys of a file, for the shared ones.

        Raises:
            VerbError: keys are not shared, or the file's were made with another pepper.
            ConfigError: the file, or a pepper, cannot be used; or a tier is not there.
        """
        from gateway.access.effective import lost_tiers
        from gateway.access.keyfile import read_pepper, read_records, shared_pepper

        if not self.keys.shared:
            hint = "write `keys: {shared: true}` and `redis: URL`"
            raise VerbError(f"the keys of {self.file} are in a file, not shared", hint)
        path = file or self.keys.file
        records = read_records(path)
        if lost := lost_tiers(records, self.config.tiers):
            raise VerbError("; ".join(lost), "add the tier to `tiers`", Exit.INVALID_CONFIG)
        if records and read_pepper(path) != shared_pepper(self.keys):
            raise VerbError(
                f"the keys of {path} were made with another pepper, so none would work",
                f"use its pepper for the shared keys: {path}.pepper",
            )
        return records

    @asynccontextmanager
    async def _store(self) -> AsyncIterator[KeyStore]:
        from gateway.access.filestore import FileKeys

        tiers = self.config.tiers
        if not self.keys.shared or self.config.redis is None:
            yield FileKeys(self.keys.file, lambda: tiers, time.time)
            return
        from gateway.access.keyfile import make_pepper, pepper_path, shared_pepper
        from gateway.access.redisstore import WITHIN_S, RedisKeys
        from gateway.core.aio import SystemClock
        from gateway.store.onredis import redis_store

        url = self.config.redis.get_secret_value()
        link = redis_store(url, SystemClock(), WITHIN_S).link
        try:
            if self.keys.pepper is None and not pepper_path(self.keys.file).exists():
                part = await RedisKeys(link, b"", lambda: tiers, time.time).read()
                if not part.pepper:  # these will be the first keys
                    make_pepper(self.keys.file)
            yield RedisKeys(link, shared_pepper(self.keys), lambda: tiers, time.time)
        finally:
            await link.close()


async def taken_over(
    store: KeyStore, records: Sequence[KeyRecord]
) -> list[tuple[KeyRecord, KeyRecord]]:
    """Keep records in the shared store; return those whose id was there, with what is there."""
    from gateway.access.redisstore import RedisKeys

    assert isinstance(store, RedisKeys)
    found = [(record, await store.put(record, "")) for record in records]
    return [(record, other) for record, other in found if other is not None]


def _in_words_of_options(name: str, why: str) -> str:
    told = why.removeprefix(f"{name}: ").removeprefix(f"{name}.")
    if told.startswith("unknown setting"):  # so it has no option
        return f"--unset: {told}"
    named = _OPTIONS.get(name, f"--{name.replace('_', '-')}")
    return f"{named}: {told}"
