"""The verb of usage: what keys and tenants used, for people, programs and spreadsheets."""

from __future__ import annotations

import sys
from typing import Annotated, Any, Final, Literal
from urllib.parse import urlencode

import typer

from gateway.cli.console import ask_all, print_json, print_table
from gateway.cli.verbs import LOCAL, Server, Token, id_of

_INCOMPLETE: Final = (
    "WARNING: Redis does not answer this gateway. This lists only its own usage; ask again later.\n"
)
_CENT: Final = 0.01

_ADDED_UP_S: Final = 60.0  # a month of a thousand keys may take ten seconds


def usage(  # noqa: PLR0913 - the options of a verb
    first: Annotated[
        str | None, typer.Option("--from", help="First day (UTC), such as 2026-11-01.")
    ] = None,
    last: Annotated[str | None, typer.Option("--to", help="Last day. Default: today.")] = None,
    by: Annotated[
        str, typer.Option(help="What to group by: day, tenant, key, model, adapter.")
    ] = "day,tenant,key,model,adapter",
    tenant: Annotated[str | None, typer.Option(help="Only this tenant.")] = None,
    key: Annotated[str | None, typer.Option(help="Only the key with this id.")] = None,
    model: Annotated[str | None, typer.Option(help="Only this model.")] = None,
    server: Server = LOCAL,
    token: Token = "",
    output: Annotated[
        Literal["table", "json", "csv"], typer.Option("-o", "--output", help="How to print it.")
    ] = "table",
) -> None:
    """Show what was used: requests, tokens and money, by day, tenant, key, model and adapter.

    With a Redis it is what all gateways were used for, else what this one was. While Redis does not answer,
    a warning on standard error says that others are missing, and so does `complete` in JSON and CSV.
    """
    asked = {"first": first, "last": last, "tenant": tenant, "model": model}
    asked["key"] = key and id_of(key)
    given = {name: it for name, it in asked.items() if it}
    given["by"] = by or ","  # no group: all in one line
    path = f"/admin/v1/usage?{urlencode(given)}"
    told = ask_all(server, path, token, _ADDED_UP_S)
    rows: list[dict[str, Any]] = told.get("data", [])
    if not all(each.get("complete", True) for each in rows):
        sys.stderr.write(_INCOMPLETE)
    if output == "json":
        print_json(told)
    elif output == "csv":
        from gateway.usage.report import as_csv

        print(as_csv(rows), end="")
    else:
        names = [name for name in by.split(",") if name]
        print_table([_row(each, names) for each in rows], empty="no usage")


def _row(each: dict[str, Any], by: list[str]) -> dict[str, str]:
    told = {name: str(each[name] or "-") for name in by}
    counts = ("requests", "input_tokens", "cached_tokens", "output_tokens")
    told |= {name.removesuffix("_tokens"): f"{each[name]:,}" for name in counts}
    return told | {"money": _money(each["money"])}


def _money(amount: float) -> str:
    """Return an amount with four decimals, or, where that hides most of it, with all nine that are kept."""
    decimals = 4 if amount >= _CENT else 9
    return f"{amount:,.{decimals}f}".rstrip("0").rstrip(".")
