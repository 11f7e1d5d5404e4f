"""`vllm-gateway bundle`: what a bug report needs, in one file, without a secret."""

from __future__ import annotations

import contextlib
import io
import json
import platform
import re
import sys
import tarfile
import time
from collections.abc import Collection, Iterator
from importlib.metadata import distributions
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from gateway.cli.console import VerbError, fetch
from gateway.cli.settings import DEFAULT_FILE, ConfigFile
from gateway.cli.verbs import LOCAL, OwnServer, Token

if TYPE_CHECKING:
    from gateway.config.models import Config

_LEAST_CHARS: Final = 4  # of a secret that no word of a report is likely to be
_LONG_CHARS: Final = 8  # of a secret that is masked within words, too
_TAIL_BYTES: Final = 1024 * 1024  # of the log
_ASKED: Final = {
    "status.json": "/admin/v1/overview",
    "events.json": "/admin/v1/events?limit=200",
    "requests.json": "/admin/v1/requests?limit=100",
    "reloads.json": "/admin/v1/config/history?limit=50",
    "metrics.txt": "/metrics",
}
_LEFT_OUT: Final = (
    "The settings, what the doctor finds, and the log are left out: the settings are wrong, so which secrets"
    " these may hold is not known."
    " Correct what findings.txt names, or name another file with --config."
)


def bundle(
    config: ConfigFile = DEFAULT_FILE,
    out: Annotated[Path, typer.Option(help="The file to write.")] = Path(
        "vllm-gateway-bundle.tar.gz"
    ),
    log: Annotated[
        Path | None, typer.Option(help="The gateway's log; its last MiB is packed.")
    ] = None,
    server: OwnServer = "",
    token: Token = "",
) -> None:
    """Pack what a bug report needs: settings, status, events, requests, reloads, metrics, versions, the log's end.

    With what `vllm-gateway doctor` finds, which asks each backend. Prompts are in none of it. Secrets are masked; a
    short word only where it stands alone, and one of less than four characters only where it looks like a secret, as in
    `api_key=abc`. Look into it before you send it. The log and the doctor's findings are left out while the settings
    are wrong.
    """
    from gateway.cli.doctor.running import whom_to_ask

    parts, secrets, known = _settings(config)
    parts["versions.txt"] = versions()
    asked = (server or LOCAL, token) if known is None else whom_to_ask(known, server, token)
    for name, path in _ASKED.items():
        parts[name] = _answer(path, *asked)
    if known is not None:
        parts["doctor.txt"] = _diagnosed(config, *asked)
    if log is not None:
        parts["log.txt"] = _LEFT_OUT if known is None else _tail(log)
    packed = pack({name: masked(text, {*secrets, token.strip()}) for name, text in parts.items()})
    try:
        out.write_bytes(packed)
    except OSError as error:
        raise VerbError(f"{out}: {error.strerror}") from error
    left_out = f" {_LEFT_OUT}" if known is None else ""
    sys.stdout.write(
        f"{out}: {', '.join(parts)} ({len(packed) // 1024 + 1} KiB). Secrets are masked.{left_out}\n"
    )


def _settings(file: Path) -> tuple[dict[str, str], set[str], Config | None]:
    """Return the settings in force and what is wrong with the file, the secrets in them, and the settings.

    The last is None while they are wrong: not all secrets may be known then.
    """
    from gateway.config.load import check_file
    from gateway.config.spell import spell

    checked = check_file(file)
    parts = {"findings.txt": "\n".join(each.excerpt() for each in checked.findings)}
    if checked.loaded is None:
        # What is wrong may be a secret, or its name.
        partial = checked.partial
        return parts, set() if partial is None else secrets_of(partial.config), None
    config = checked.loaded.config
    parts["settings.json"] = json.dumps(spell(config), indent=1, ensure_ascii=False)
    return parts, secrets_of(config), config


def secrets_of(config: Config) -> set[str]:
    """Return the value of each secret setting."""
    from pydantic import BaseModel, SecretStr

    from gateway.config.spell import FOR_A_SECRET
    from gateway.config.supervision import LaunchConfig

    def within(value: object) -> Iterator[str]:
        if isinstance(value, LaunchConfig):
            yield from (text for name, text in value.env.items() if FOR_A_SECRET.fullmatch(name))
        if isinstance(value, SecretStr):
            yield value.get_secret_value()
        elif isinstance(value, BaseModel):
            for name in type(value).model_fields:
                yield from within(getattr(value, name))
        elif isinstance(value, dict):
            for each in value.values():
                yield from within(each)
        elif isinstance(value, (list, tuple)):
            for each in value:
                yield from within(each)

    return set(within(config))


def masked(text: str, secrets: Collection[str]) -> str:
    """Return the text without the secrets, as they are or as JSON writes them, and without what looks like one.

    One that is a short word, as `model`, is masked where it stands alone and names no field or label. One of less
    than four characters is masked only where it looks like a secret: a mask on each `a` or `1` would tell it.
    """
    from gateway.observe.redact import redact

    kept = (each for each in secrets if len(each.strip()) >= _LEAST_CHARS)
    written = {form for each in kept for form in (each, *_as_json(each))}
    # The longest first: one secret may be a part of another.
    for each in sorted(written, key=len, reverse=True):
        found = re.escape(each)
        if len(each) < _LONG_CHARS and (each.isalpha() or each.isdigit()):
            found = rf"(?:(?<!\w)|(?<=\\[nrt])){found}(?!\w|\"\s*:|=\")"
        text = re.sub(found, "***", text)
    return redact(text)


def _as_json(secret: str) -> tuple[str, str]:
    return json.dumps(secret)[1:-1], json.dumps(secret, ensure_ascii=False)[1:-1]


def versions() -> str:
    """Return the versions of Python, the system, and the packages that are installed beside the gateway."""
    lines = [f"python {sys.version}", f"system {platform.platform()}"]
    found = {each.metadata["Name"]: each.version for each in distributions()}
    return "\n".join([*lines, *(f"{name} {found[name]}" for name in sorted(found, key=str.lower))])


def pack(parts: dict[str, str]) -> bytes:
    """Return a tar file with the texts."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for name, text in parts.items():
            content = text.encode("utf-8", "replace")
            entry = tarfile.TarInfo(f"vllm-gateway-bundle/{name}")
            entry.size, entry.mtime = len(content), int(time.time())
            tar.addfile(entry, io.BytesIO(content))
    return packed.getvalue()


def _answer(path: str, server: str, token: str) -> str:
    """Return what the gateway answers; why not, if it does not: a report of one that is down is one, too."""
    try:
        return fetch(server, path, token).decode("utf-8", "replace")
    except VerbError as error:
        return f"not available: {error}"


def _diagnosed(file: Path, server: str, token: str) -> str:
    """Return what `vllm-gateway doctor` prints."""
    from gateway.cli.doctor.verb import doctor

    told = io.StringIO()
    try:
        with contextlib.redirect_stdout(told), contextlib.redirect_stderr(told):
            doctor(config=file, server=server, token=token)
    except typer.Exit:  # its exit code says whether anything is wrong
        return told.getvalue()
    except VerbError as error:
        return f"not available: {error}"
    return told.getvalue()


def _tail(file: Path) -> str:
    try:
        with file.open("rb") as lines:
            start = lines.seek(max(0, file.stat().st_size - _TAIL_BYTES))
            # In the middle of a line, and maybe of a secret: its rest would not be known for one.
            if start:
                lines.readline()
            return lines.read().decode("utf-8", "replace")
    except OSError as error:
        raise VerbError(f"{file}: {error.strerror}") from error
