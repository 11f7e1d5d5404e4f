"""`check`: what `serve` reads at its start beside the settings: files, programs, the URL of a Redis."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Collection, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from gateway.config.effectcheck import budget_in, without_prices
from gateway.config.findings import Finding, KeyPath, Remark, warning
from gateway.config.launched import model_of
from gateway.config.load import Loaded, placed
from gateway.config.models import Config
from gateway.config.process import KeysConfig
from gateway.config.supervision import LaunchConfig
from gateway.core.errors import ConfigError
from gateway.launch.disk import why_unwritable
from gateway.launch.spawn import run_together

_ENDED: Final = frozenset({"revoked", "expired"})


def file_findings(loaded: Loaded, file: Path, wrong: Collection[KeyPath] = ()) -> list[Finding]:
    """Return what is wrong with the URL, the keys file and the tokenizers, at their settings.

    A keys file or a pepper that is missing is a warning: a file is checked before the first key is made,
    and in places that hold no keys. The default in the place of a `wrong` setting is not judged.
    """
    remarks = [*_redis(loaded.config), *_state(loaded.config.state)]
    keys = loaded.config.keys
    if keys is not None and keys.shared:
        remarks += _shared_pepper(keys, file)
    elif keys is not None:
        remarks += _keys(loaded.config, keys, file)
    for name, pool in loaded.config.pools.items():
        if pool.tokenizer is not None:
            remarks += _tokenizer(("pools", name, "tokenizer"), pool.tokenizer)
        for place, backend in enumerate(pool.backends):
            if backend.launch is not None:
                path: KeyPath = ("pools", name, "backends", place, "launch")
                remarks += _launched(path, f"{name}/{backend.name}", backend.launch)
    return [
        placed(remark, loaded, file)
        for remark in remarks
        if not any(path and remark.path[: len(path)] == path for path in wrong)
    ]


def _redis(config: Config) -> Iterator[Remark]:
    if config.redis is None or find_spec("redis") is None:
        return  # without the library, there is a finding already
    from gateway.core.aio import SystemClock
    from gateway.store.onredis import redis_store

    try:
        redis_store(config.redis.get_secret_value(), SystemClock())
    except ValueError as error:
        yield Remark(("redis",), "bad-url", f"this is not the URL of a Redis: {error}")


def _shared_pepper(keys: KeysConfig, file: Path) -> Iterator[Remark]:
    from gateway.access.keyfile import pepper_of, pepper_path

    if keys.pepper is not None:
        try:
            pepper_of(keys.pepper.get_secret_value().encode(), "keys.pepper")
        except ConfigError as error:
            yield from _unusable(("keys", "pepper"), "bad-keys", error)
    elif not pepper_path(keys.file).exists():
        yield warning(
            ("keys", "shared"),
            "keys-missing",
            f"{pepper_path(keys.file)}: there is no such file; `serve` needs it to start",
            "copy it from a gateway that works, or set `keys.pepper`; for the first gateway"
            f" `vllm-gateway keys create NAME -c {file}` creates it",
        )


def _keys(config: Config, keys: KeysConfig, file: Path) -> Iterator[Remark]:
    from gateway.access.effective import lost_tiers
    from gateway.access.keyfile import pepper_path, read_pepper, read_records

    where, path = ("keys", "file"), keys.file
    create = f"`vllm-gateway keys create NAME -c {file}`"
    if found := _not_opened(where, path, f"{create} creates it"):
        if keys.oidc is None or found.code != "keys-missing":  # tokens do without keys
            yield found
        return
    try:
        records = read_records(path)
        for lost in lost_tiers(records, config.tiers):
            yield Remark(where, "unknown-tier", f"{path}: {lost}")
        budgets = [(each.id, budget_in(each.own.limits)) for each in records]
        stated = [f"{rule} of the key {key_id}" for key_id, rule in budgets if rule is not None]
        if stated and not config.prices.models:
            yield without_prices(where, stated[0])
        if records:
            hint = "it is created with the first key; keep it beside the keys file"
            if found := _not_opened(where, pepper_path(path), hint):
                yield found
            else:
                read_pepper(path)
        ended = all(each.state(time.time()) in _ENDED for each in records)
        if ended and keys.oidc is None:
            none = "no key that is valid: all were revoked or have expired" if records else "no key"
            told = f"{path} has {none}, so no client can get in"
            yield warning(where, "no-keys", told, f"make one: {create}")
    except ConfigError as error:
        yield from _unusable(where, "bad-keys", error)


def _not_opened(where: KeyPath, path: Path, to_make: str) -> Remark | None:
    """Return why a file that `serve` needs cannot be opened; `to_make` is the hint where it is missing."""
    try:
        path.open("rb").close()
    except OSError as error:
        told = f"{path}: {error.strerror}; `serve` needs this file to start"
        if isinstance(error, FileNotFoundError):
            return warning(where, "keys-missing", told, to_make)
        return Remark(where, "bad-keys", told, "name a file that the gateway's user can read")
    return None


def _state(folder: Path) -> Iterator[Remark]:
    if why := why_unwritable(folder):
        yield warning(
            ("state",),
            "state-unwritable",
            f"{folder} cannot be written by this user, so drains and history would not be kept: {why}",
            "let the gateway's user write there, or name another folder",
        )


def _tokenizer(where: KeyPath, folder: Path) -> Iterator[Remark]:
    from gateway.counting.tokens import LocalCounter

    try:
        LocalCounter(folder, deadline_s=0.0)
    except ConfigError as error:
        yield from _unusable(where, "bad-tokenizer", error)


def _launched(where: KeyPath, backend_id: str, launch: LaunchConfig) -> Iterator[Remark]:
    """Say which program or model folder is missing here. Files may be checked on another machine."""
    program, path = launch.command[0], launch.env.get("PATH", os.environ.get("PATH", os.defpath))
    if shutil.which(program, path=path) is None:
        shown, hint = program, "write its absolute path, such as /opt/vllm/bin/vllm"
        if first := run_together(program):
            shown, hint = f"{first} ...", f"write each word apart: [{first}, ...]"
        elif program.startswith("/"):
            hint = "see that it is there and may be run"
        yield warning(
            (*where, "command"),
            "program-missing",
            f"{backend_id} cannot start on this machine: there is no program `{shown}`",
            hint,
        )
    model = model_of(launch)
    if model is not None and model.startswith(("/", "./", "../")) and not os.path.isdir(model):
        yield warning(
            (*where, "command"),
            "model-folder-missing",
            f"{backend_id} cannot start on this machine: there is no folder {model}",
        )


def _unusable(where: KeyPath, code: str, error: ConfigError) -> Iterator[Remark]:
    for finding in error.findings:
        yield Remark(where, code, finding.replace(": error: ", ": ", 1))
