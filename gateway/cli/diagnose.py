"""The verb `diagnose`: what a vLLM log says, for people or as JSON."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO, Final, Literal

import typer

from gateway.cli.console import Exit, VerbError, print_json

if TYPE_CHECKING:
    from gateway.vllmlog.verdict import Advice, Diagnosis

_CHUNK: Final = 1024 * 1024
_SURE: Final = {"high": "sure", "medium": "likely", "low": "a guess"}
_WIDEST: Final = 40  # of the column of flags


def diagnose(
    file: Annotated[
        str, typer.Argument(metavar="FILE|-", help="A vLLM log file, or - for standard input.")
    ],
    output: Annotated[
        Literal["text", "json"], typer.Option("--output", "-o", help="text or json.")
    ] = "text",
    exited: Annotated[
        int | None, typer.Option(help="The server's exit code, if known; -9 means killed.")
    ] = None,
) -> None:
    """Read the end of a vLLM log and say what went wrong and how to fix it.

    The exit code is 0 for every diagnosis, including healthy and unknown.
    """
    from gateway.vllmlog.diagnosis import diagnose as judge

    tail, lines_before = _tail(file)
    found = judge(tail, exit_code=exited)
    if found.line:
        found = replace(found, line=found.line + lines_before)
    if output == "json":
        print_json(found.fields())
    else:
        sys.stdout.write(as_text(found))


def as_text(found: Diagnosis) -> str:
    """Return a diagnosis for people: the cause, its proof, and flags to copy."""
    lines = [
        found.cause,
        "",
        f"  class     {found.kind.value} ({found.when.value}, {_SURE[found.confidence.value]})",
    ]
    if found.evidence:
        lines.append(f"  {f'line {found.line}':<9} {found.evidence.strip()}")
    if found.remedies:
        lines += ["", "What to do, best option first:"]
        flags = [_command(each) for each in found.remedies]
        width = min(_WIDEST, max(map(len, flags)))
        lines += [
            f"  {flag:<{width}}  {each.why}" if flag else f"  {each.why}"
            for flag, each in zip(flags, found.remedies, strict=True)
        ]
    if not found.healthy:
        lines += ["", _restart(found.restart_helps)]
    if found.look_at:
        lines.append(f"Look at: {found.look_at}.")
    return "\n".join(lines) + "\n"


def _command(remedy: Advice) -> str:
    flag = " ".join(part for part in (remedy.flag, remedy.value) if part)
    return f"remove {flag}" if remedy.remove else flag


def _restart(helps: bool | None) -> str:
    if helps is None:
        return "It is unclear whether a restart alone helps."
    return "A restart alone may help." if helps else "A restart alone does not help."


def _tail(name: str) -> tuple[bytes, int]:
    """Return the end of a log, and how many lines were left out before it."""
    if name == "-":
        return _last(sys.stdin.buffer)
    try:
        with Path(name).open("rb") as file:
            return _last(file)
    except FileNotFoundError as error:
        hint = "pass a log file, or - for standard input: docker logs NAME 2>&1 | vllm-gateway diagnose -"
        raise VerbError(f"{name} does not exist", hint, Exit.NOT_FOUND) from error
    except OSError as error:
        raise VerbError(f"{name} cannot be read: {error.strerror or error}") from error


def _last(file: BinaryIO) -> tuple[bytes, int]:
    """Read a stream to its end, keeping no more than the end of it."""
    from gateway.vllmlog.lines import MAX_CHARS

    kept, lines_before = bytearray(), 0
    while chunk := file.read(_CHUNK):
        kept += chunk
        if len(kept) > MAX_CHARS:
            lines_before += kept.count(b"\n", 0, len(kept) - MAX_CHARS)
            del kept[:-MAX_CHARS]
    return bytes(kept), lines_before
