"""What every verb of the command line shares: exit codes, failures, JSON, tables, asking a gateway.

Results go to standard output, everything else to standard error.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any


class Exit(IntEnum):
    """What the exit code says."""

    OK = 0
    FAILURE = 1
    USAGE = 2
    INVALID_CONFIG = 3
    NOT_FOUND = 4
    NOT_ALLOWED = 5
    DEGRADED = 8


class VerbError(Exception):
    """A verb that cannot go on: a sentence, what to do, and the exit code."""

    def __init__(self, message: str, hint: str = "", code: Exit = Exit.FAILURE) -> None:
        super().__init__(message)
        self.hint = hint
        self.code = code


def print_failure(error: Exception) -> Exit:
    """Print one line and a hint about whatever ended a verb; return the exit code."""
    from gateway.core.errors import ConfigError

    if isinstance(error, ConfigError):
        _to_stderr("\n".join(error.findings))
        return Exit.INVALID_CONFIG
    hint, code = "", Exit.FAILURE
    if isinstance(error, VerbError):
        message, hint, code = str(error), error.hint, error.code
    elif isinstance(error, OSError):
        message = ": ".join(str(part) for part in (error.filename, error.strerror) if part)
    else:
        message = f"this is a bug: {type(error).__name__}: {error}"
        hint = "run it again with -vv for the traceback, and report it"
    _to_stderr(f"vllm-gateway: {message or error}")
    if hint:
        _to_stderr(f"  hint: {hint}")
    return code


def print_json(value: object) -> None:
    """Print a result for programs."""
    sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def print_table(rows: Sequence[Mapping[str, object]], *, empty: str = "none") -> None:
    """Print rows for people, numbers to the right; names of columns are the keys of the first."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    if not rows:
        sys.stdout.write(f"{empty}\n")
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in rows[0]:
        numeric = all(isinstance(row[name], int | float) or row[name] is None for row in rows)
        table.add_column(name.upper(), justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(_cell(value)) for value in row.values()))
    # Piped output is not cut to a screen that is not there.
    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else 200
    Console(width=width, highlight=False).print(table)


def _cell(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(str(item) for item in value)
    return "-" if value is None else str(value)


def ask(server: str, path: str, token: str, *, timeout_s: float = 5.0) -> dict[str, Any]:
    """Return the JSON object that an admin listener answers.

    Args:
        server: its URL, or `unix:/path`.
        path: from the root, such as /admin/v1/overview.
        token: sent as a bearer token unless empty.
        timeout_s: for each step.

    Raises:
        VerbError: it does not answer, or not that.
    """
    import httpx2

    uds = server.removeprefix("unix:") if server.startswith("unix:") else None
    url = ("http://localhost" if uds else server.rstrip("/")) + path
    headers = {"authorization": f"Bearer {token}"} if token else {}
    try:
        # A TLS context costs 50 ms, which plain HTTP need not wait for.
        transport = httpx2.HTTPTransport(uds=uds, verify=url.startswith("https:"))
        with httpx2.Client(transport=transport, trust_env=False, timeout=timeout_s) as http:
            reply = http.get(url, headers=headers)
        answer = reply.json() if reply.is_success else None
    except httpx2.HTTPError as error:
        hint = "is it running? `vllm-gateway serve -c FILE`; another address: --server URL"
        raise VerbError(f"{server} does not answer: {error}", hint) from error
    except (httpx2.InvalidURL, ValueError) as error:
        hint = "the admin listener has its own port, see `admin.listen`"
        raise VerbError(f"{server} is no admin listener: {error}", hint) from error
    if reply.status_code in (401, 403):
        hint = "give it with --token or GATEWAY_ADMIN_TOKEN"
        raise VerbError(f"{server} asks for its token", hint, Exit.NOT_ALLOWED)
    if not isinstance(answer, dict):
        hint = "the admin listener has its own port, see `admin.listen`"
        message = f"{server} answered {reply.status_code} to {path}"
        raise VerbError(message, hint, Exit.NOT_FOUND)
    return answer


def _to_stderr(text: str) -> None:
    sys.stderr.write(text + "\n")
