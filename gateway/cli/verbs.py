"""The verbs that look at a running gateway: status, explain, requests, route."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable
from typing import Annotated, Any, Final, Literal
from urllib.parse import quote, urlencode

import typer
from typer.core import TyperGroup

from gateway.cli.console import Exit, VerbError, ask, print_json, print_list
from gateway.cli.explaining import print_request, request_row
from gateway.cli.report import print_reason
from gateway.cli.statusview import degraded, fitting, overview_lines
from gateway.cli.terminal import Terminal
from gateway.core.bounds import MOST_ROWS

AsTable = Annotated[Literal["table", "json"], typer.Option("--output", "-o", help="table or json.")]
AsText = Annotated[Literal["text", "json"], typer.Option("--output", "-o", help="text or json.")]
SERVER: Final = "GATEWAY_ADMIN_URL"
TOKEN: Final = "GATEWAY_ADMIN_TOKEN"
KEYS_SERVER: Final = "GATEWAY_KEYS_SERVER"  # apart: who asks one gateway may keep keys in a file
Server = Annotated[
    str, typer.Option(envvar=SERVER, help="URL of the admin listener, or unix:/path.")
]
OwnServer = Annotated[
    str,
    typer.Option(envvar=SERVER, help="The admin listener. Default: `admin.listen` of the file."),
]
Limit = Annotated[int, typer.Option(min=1, max=MOST_ROWS, help="How many.")]
Token = Annotated[str, typer.Option(envvar=TOKEN, help="Token of the admin listener.")]
LOCAL: Final = "http://127.0.0.1:9090"
_WATCH_S: Final = 2.0

_WHOLE_KEY: Final = re.compile(r"gw_([a-z0-9]{8})_.*", re.DOTALL)


def id_of(key: str) -> str:
    """Return the id of a key that is named by its id, or whole: no secret goes into a URL or a message."""
    return _WHOLE_KEY.sub(r"\1", key.strip())


class _Verbs(TyperGroup):
    """A group that says in plain words what is wrong with an option."""

    def invoke(self, ctx: Any) -> Any:
        """Run the verb of a command line."""
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            from pydantic import ValidationError

            from gateway.config.explain import in_words

            if isinstance(error.__cause__, ValidationError):
                told = in_words(error.__cause__.errors()[0])
                error.message = told or error.message.removeprefix("Value error, ")
            raise


def group(help_text: str) -> typer.Typer:
    """Return a group of verbs, as they all look."""
    return typer.Typer(
        cls=_Verbs,
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
        bool, typer.Option("--exit-code", help="Exit with 8 if anything is degraded or down.")
    ] = False,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Show it anew each 2 s, until Ctrl-C.")
    ] = False,
) -> None:
    """Show what is wrong and what to do about it, worst first; then pools and backends.

    Requests, errors, refusals (shed), times to first token (ttft), gaps between tokens and tokens per second are
    those of the last 5 minutes. In flight are requests of this gateway; running and waiting is what the
    engine says.
    """

    def look() -> dict[str, Any]:
        return ask(server, "/admin/v1/overview", token)

    if watch:
        _watch(look)
        return
    overview = look()
    if output == "json":
        print_json(overview)
    else:
        sys.stdout.write("\n".join(overview_lines(overview, Terminal.of_stdout())) + "\n")
    raise typer.Exit(Exit.DEGRADED if exit_code and degraded(overview) else Exit.OK)


def _watch(look: Callable[[], dict[str, Any]]) -> None:
    """Show the overview again and again; a gateway that does not answer is said so, and asked again."""
    clear = "\x1b[H\x1b[2J" if sys.stdout.isatty() else ""
    try:
        while True:
            terminal = Terminal.of_stdout()
            try:
                lines = overview_lines(look(), terminal)
            except VerbError as error:
                lines = [f"{terminal.sign('down')} {error}", *([error.hint] if error.hint else [])]
            at = f"{time.strftime('%H:%M:%S')}, again in 2 s"
            lines = fitting([*lines, "", at], terminal.height)
            sys.stdout.write(clear + "\n".join(lines) + "\n")
            sys.stdout.flush()
            time.sleep(_WATCH_S)
    except KeyboardInterrupt:
        return


def explain(
    request_id: Annotated[str | None, typer.Argument(metavar="[REQUEST_ID]")] = None,
    last_error: Annotated[
        bool, typer.Option("--last-error", help="The newest request that did not end well.")
    ] = False,
    key: Annotated[
        str | None, typer.Option(help="The newest request of this key, by its id.")
    ] = None,
    server: Server = LOCAL,
    token: Token = "",
    output: AsTable = "table",
) -> None:
    """Show what became of a request: its timeline, attempts, why this backend, what was changed, tokens.

    Exit code 4: there is no record of it.
    """
    if (request_id is None) == (key is None and not last_error):
        raise VerbError("Name a request, or use --last-error, --key, or both.", code=Exit.USAGE)
    if request_id is None:
        request_id = _newest(server, token, last_error=last_error, key=key)
    told = ask(server, f"/admin/v1/requests/{quote(request_id, safe='')}", token)
    if output == "json":
        print_json(told)
    else:
        print_request(told)


def _newest(server: str, token: str, *, last_error: bool, key: str | None) -> str:
    """Return the id of the newest request of a key, or of any."""
    query = {"limit": "1", "key": "" if key is None else id_of(key)}
    query["errors"] = "true" if last_error else "false"
    rows = ask(server, f"/admin/v1/requests?{urlencode(query)}", token).get("data", [])
    if not rows:
        of = "" if key is None else " of this key"
        what = f"No request{of} that did not end well" if last_error else f"No request{of}"
        raise VerbError(f"{what} is kept.", code=Exit.NOT_FOUND)
    return str(rows[0]["id"])


def requests(  # noqa: PLR0913 - the options of a verb
    errors: Annotated[
        bool, typer.Option("--errors", help="Only those that did not end well.")
    ] = False,
    state: Annotated[
        str | None, typer.Option(help="Only those: reading, waiting, running or ended.")
    ] = None,
    key: Annotated[str | None, typer.Option(help="Only of the key with this id.")] = None,
    tenant: Annotated[str | None, typer.Option(help="Only of this tenant.")] = None,
    model: Annotated[str | None, typer.Option(help="Only for this model.")] = None,
    backend: Annotated[str | None, typer.Option(help="Only of this backend: POOL/NAME.")] = None,
    limit: Limit = 20,
    server: Server = LOCAL,
    token: Token = "",
    output: AsTable = "table",
) -> None:
    """List the requests that are under way or ended lately, the newest first."""
    wanted = {
        "limit": limit, "errors": str(errors).lower(), "state": state, "tenant": tenant, "model": model,
        "backend": backend, "key": None if key is None else id_of(key),
    }  # fmt: skip
    given = {name: each for name, each in wanted.items() if each is not None}
    told = ask(server, f"/admin/v1/requests?{urlencode(given)}", token)
    print_list(told, output, request_row, empty="no requests")


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
    query = {
        "model": model,
        "tokens": _tokens("--tokens", tokens),
        "output": _tokens("--output-tokens", output_tokens),
        "key": None if key is None else id_of(key),
        "endpoint": endpoint,
    }
    known = {name: value for name, value in query.items() if value is not None}
    told = ask(server, f"/admin/v1/route?{urlencode(known)}", token)
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
