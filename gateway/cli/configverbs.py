"""The verbs that ask a running gateway about its configuration, or have it read its file again."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from gateway.cli.console import Exit, VerbError, ask, print_json, print_list
from gateway.cli.operating import DryRun, Reason
from gateway.cli.terminal import clock
from gateway.cli.verbs import LOCAL, AsTable, Limit, Server, Token

_SLOW_S = 30.0  # a large file takes seconds to check

File = Annotated[
    Path | None,
    typer.Argument(help="A file here, whose text is sent. Default: the gateway's own file."),
]


def effective(server: Server = LOCAL, token: Token = "", output: AsTable = "table") -> None:
    """Print every setting that a running gateway has in force, and where each comes from."""
    told = ask(server, "/admin/v1/config", token)
    if output == "json":
        print_json(told)
        return
    for row in told["settings"]:
        value = json.dumps(row["value"], ensure_ascii=False)
        sys.stdout.write(f"{row['setting']}: {value}  # {row['origin']}\n")


def validate(
    file: File = None, server: Server = LOCAL, token: Token = "", output: AsTable = "table"
) -> None:
    """Have a running gateway check a file, where it runs. Exit code 3 if it cannot be used."""
    _judge(file, "validate", server, token, output)


def diff(
    file: File = None, server: Server = LOCAL, token: Token = "", output: AsTable = "table"
) -> None:
    """Print what a file would change of what is in force. Exit code 3 if it cannot be used."""
    _judge(file, "diff", server, token, output)


def reload(
    reason: Reason = "",
    dry_run: DryRun = False,
    server: Server = LOCAL,
    token: Token = "",
    output: AsTable = "table",
) -> None:
    """Have a gateway read its file again, like SIGHUP, and print what that changes. No stream is touched.

    Exit code 3: the file is not valid, and nothing changes.
    """
    order: dict[str, object] = {"reason": reason, "dry_run": dry_run}
    told = ask(server, "/admin/v1/config:reload", token, order=order, timeout_s=_SLOW_S)
    if output == "json":
        print_json(told)
        return
    sys.stdout.write("reloaded\n" if told["reloaded"] else "dry run: nothing was changed\n")
    _print_effect(told["effect"])
    for each in told["warnings"]:
        hint = f"; {each['hint']}" if each["hint"] else ""
        sys.stdout.write(f"warning: line {each['line']}: {each['message']}{hint}\n")
    if any(each.startswith("needs a restart") for each in told["effect"]):
        sys.stdout.write("`vllm-gateway upgrade` starts a new process; no request is lost\n")


def history(
    limit: Limit = 20, server: Server = LOCAL, token: Token = "", output: AsTable = "table"
) -> None:
    """List what a gateway put in force, newest first: when, by whom, and what it changed."""
    told = ask(server, f"/admin/v1/config/history?limit={limit}", token)
    print_list(told, output, _tried, empty="nothing yet")


def _tried(each: dict[str, Any]) -> dict[str, object]:
    return {
        "at": clock(each["at"]),
        "by": each["by"],
        "outcome": "in force" if each["done"] else "not valid",
        "hash": each["hash"],
        "changed": "; ".join(each["effect"] or each["findings"]) or None,
        "reason": each["reason"] or None,
    }


def _judge(file: Path | None, verb: str, server: str, token: str, output: str) -> None:
    """Print what a gateway says of a file, and leave with the exit code for that."""
    order: dict[str, object] = {"text": None if file is None else _text(file)}
    told = ask(server, f"/admin/v1/config:{verb}", token, order=order, timeout_s=_SLOW_S)
    if output == "json":
        print_json(told)
    elif verb == "diff" and told["valid"]:
        _print_effect(told["effect"])
    else:
        _print_findings(told)
    raise typer.Exit(Exit.OK if told["valid"] else Exit.INVALID_CONFIG)


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise VerbError(f"{file} is not UTF-8", code=Exit.INVALID_CONFIG) from error
    except OSError as error:
        raise VerbError(f"{file}: {error.strerror}", code=Exit.INVALID_CONFIG) from error


def _print_effect(effect: list[str]) -> None:
    for each in effect or ["nothing changes"]:
        sys.stdout.write(f"{each}\n")


def _print_findings(told: dict[str, Any]) -> None:
    for each in told["findings"]:
        where = f"{each['file']}:{each['line']}:{each['column']}"
        hint = f"; {each['hint']}" if each["hint"] else ""
        sys.stdout.write(f"{where} {each['severity']} {each['message']}{hint} [{each['code']}]\n")
    sys.stdout.write("it can be used\n" if told["valid"] else "it cannot be used\n")
