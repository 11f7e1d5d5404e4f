"""The verbs that ask a running gateway over its admin listener: status, explain, route."""

from __future__ import annotations

import re
from typing import Annotated, Any, Final, Literal

import typer

from gateway.cli.console import Exit, VerbError, ask, print_json

AsTable = Annotated[Literal["table", "json"], typer.Option("--output", "-o", help="table or json.")]
Server = Annotated[
    str, typer.Option(envvar="GATEWAY_ADMIN_URL", help="URL of the admin listener, or unix:/path.")
]
Token = Annotated[
    str, typer.Option(envvar="GATEWAY_ADMIN_TOKEN", help="Token of the admin listener.")
]
LOCAL: Final = "http://127.0.0.1:9090"

_WHOLE_KEY: Final = re.compile(r"gw_([a-z0-9]{8})_.*")


def group(help_text: str) -> typer.Typer:
    """Return a group of verbs, as they all look."""
    return typer.Typer(
        help=help_text,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    )


def status(
    server: Server = LOCAL,
    token: Token = "",
    output: AsTable = "table",
    exit_code: Annotated[
        bool, typer.Option("--exit-code", help="Exit with 8 unless everything is ready.")
    ] = False,
) -> None:
    """Show the state of the gateway, its pools and backends."""
    from gateway.cli.report import degraded, print_overview

    overview = ask(server, "/admin/v1/overview", token)
    if output == "json":
        print_json(overview)
    else:
        print_overview(overview)
    raise typer.Exit(Exit.DEGRADED if exit_code and degraded(overview) else Exit.OK)


def explain(
    request_id: Annotated[str, typer.Argument(metavar="REQUEST_ID")],
    server: Server = LOCAL,
    token: Token = "",
    output: AsTable = "table",
) -> None:
    """Show why a request waited or was refused, and which setting decided.

    Exit code 4: there is no record of it.
    """
    from urllib.parse import quote

    _show(ask(server, f"/admin/v1/decisions/{quote(request_id, safe='')}", token), output)


def route(  # noqa: PLR0913 - the options of a verb
    model: Annotated[str, typer.Option(help="Model name, as a client would send it.")],
    tokens: Annotated[str, typer.Option(help="Prompt length in tokens, such as 500 or 32k.")] = "0",
    output_tokens: Annotated[
        str | None, typer.Option(help="Output limit in tokens, such as 4k.")
    ] = None,
    key: Annotated[
        str | None, typer.Option(help="Id of the API key. Default: a key that may use every model.")
    ] = None,
    endpoint: Annotated[str, typer.Option(help="Endpoint, such as chat or embeddings.")] = "chat",
    server: Server = LOCAL,
    token: Token = "",
    output: AsTable = "table",
) -> None:
    """Show what would happen to a request now, and why. Nothing is sent.

    Exit code 4: no such model.
    """
    from urllib.parse import urlencode

    query = {
        "model": model,
        "tokens": _tokens("--tokens", tokens),
        "output": _tokens("--output-tokens", output_tokens),
        "key": None if key is None else _WHOLE_KEY.sub(r"\1", key),  # no secret in a URL
        "endpoint": endpoint,
    }
    known = {name: value for name, value in query.items() if value is not None}
    _show(ask(server, f"/admin/v1/route?{urlencode(known)}", token), output)


def _show(told: dict[str, Any], output: str) -> None:
    from gateway.cli.report import print_reason

    if output == "json":
        print_json(told)
    else:
        print_reason(told)


def _tokens(name: str, text: str | None) -> int | None:
    """Read a token count; `config.units` would, but takes as long to import as all the rest."""
    found = re.fullmatch(r"([0-9]{1,9})([kKmM]?)", text or "0")
    if found is None:
        raise VerbError(
            f"{name}: {text} is not a token count; write it like 500 or 32k", code=Exit.USAGE
        )
    return (
        None if text is None else int(found[1]) * {"": 1, "k": 1024, "m": 1024**2}[found[2].lower()]
    )
