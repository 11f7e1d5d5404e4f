"""The command line: every verb and its options.

Each verb imports what it runs when it runs: `--help` and the verbs that only read must start fast.
A failure is one line and a hint; a traceback comes only with -vv or GATEWAY_DEBUG=1.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

import typer

from gateway.ops import operating, verbs
from gateway.ops.console import Exit, VerbError, print_failure, print_json, print_table
from gateway.ops.diagnose import diagnose
from gateway.ops.plan import plan

if TYPE_CHECKING:
    from gateway.access.keys import CreatedKey
    from gateway.config.load import Loaded


def _app(help_text: str) -> typer.Typer:
    return typer.Typer(
        help=help_text,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    )


app = _app("The OpenAI-compatible gateway in front of your vLLM servers.")
keys_app = _app("Create, list, revoke and rotate API keys. Only hashes are kept.")
config_app = _app("Show the settings and their schema.")
app.add_typer(keys_app, name="keys")
app.add_typer(config_app, name="config")

ConfigFile = Annotated[
    Path, typer.Option("--config", "-c", envvar="GATEWAY_CONFIG", help="The settings file.")
]
AsTable = verbs.AsTable
AsText = Annotated[Literal["text", "json"], typer.Option("--output", "-o", help="text or json.")]
Number = TypeVar("Number", int, float)
DEFAULT_FILE = Path("gateway.yaml")


def main() -> None:
    """Run the command line and exit with the code of `Exit`."""
    debug = "-vv" in sys.argv or bool(os.environ.get("GATEWAY_DEBUG"))
    try:
        app(args=[word for word in sys.argv[1:] if word != "-vv"], prog_name="vllm-gateway")
    except Exception as error:
        if debug:
            raise
        sys.exit(print_failure(error))


def _version(wanted: bool) -> None:
    if wanted:
        from gateway import __version__

        print(f"vllm-gateway {__version__}")
        raise typer.Exit


@app.callback(epilog="-vv anywhere, or GATEWAY_DEBUG=1, shows tracebacks.")
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


# --- running --------------------------------------------------------------------------------------


@app.command(epilog="Example: vllm-gateway serve -c gateway.yaml")
def serve(config: ConfigFile = DEFAULT_FILE) -> None:
    """Run the gateway. SIGHUP reloads the file, SIGTERM drains."""
    _usable(config)  # with source lines; the server itself would log one line each
    from gateway.app import serve as run

    raise typer.Exit(run(config))


@app.command(epilog="Example: vllm-gateway demo --traffic --fault stall_after:5")
def demo(
    traffic: Annotated[bool, typer.Option("--traffic", help="Send requests to it.")] = False,
    fault: Annotated[str | None, typer.Option(help="Plant this fault in one backend.")] = None,
    port: Annotated[int, typer.Option(help="Public port; 0 takes a free one.")] = 8080,
    admin_port: Annotated[int, typer.Option(help="Admin port; 0 takes a free one.")] = 9090,
) -> None:
    """Run a gateway with three simulated backends on loopback. Needs no GPU."""
    if fault is not None:
        _known_faults([fault])
    from gateway.demo import demo as run

    raise typer.Exit(run(port=port, admin_port=admin_port, traffic=traffic, fault=fault))


@app.command(epilog="Example: vllm-gateway sim --port 8001 --model qwen3-8b --adapter sql")
def sim(  # noqa: PLR0913 - the options of a verb
    port: Annotated[int, typer.Option(help="Its port.")],
    host: Annotated[str, typer.Option(help="Its address.")] = "127.0.0.1",
    model: Annotated[str, typer.Option(help="The model it serves.")] = "sim",
    adapter: Annotated[list[str] | None, typer.Option(help="A LoRA adapter. Repeatable.")] = None,
    max_model_len: Annotated[int, typer.Option(min=1, help="Context window, in tokens.")] = 8192,
    fault: Annotated[list[str] | None, typer.Option(help="A fault. Repeatable.")] = None,
    api_key: Annotated[str | None, typer.Option(help="Ask for this key.")] = None,
) -> None:
    """Run one simulated vLLM server."""
    from gateway.sim.config import SimConfig
    from gateway.sim.server import run

    smallest = SimConfig()
    config = SimConfig(
        model=model,
        adapters=tuple(adapter or ()),
        max_model_len=max_model_len,
        host=host,
        port=port,
        api_key=api_key,
        num_blocks=max(smallest.num_blocks, 4 * max_model_len // smallest.block_size),
    )
    _known_faults(fault or [])
    run(config, fault or [])


def _known_faults(texts: list[str]) -> None:
    from gateway.sim.faults import Fault

    try:
        for text in texts:
            Fault.parse(text)
    except ValueError as error:
        raise VerbError(str(error), code=Exit.USAGE) from error


# --- settings -------------------------------------------------------------------------------------


@app.command(epilog="Example: vllm-gateway check gateway.yaml --probe")
def check(
    file: Annotated[Path, typer.Argument(help="The settings file.")] = DEFAULT_FILE,
    probe: Annotated[bool, typer.Option("--probe", help="Ask the backends too.")] = False,
    output: AsText = "text",
) -> None:
    """Say everything that is wrong with a settings file. Exit code 3 when it cannot be used."""
    from gateway.config.load import check_file

    checked = check_file(file)
    findings = list(checked.findings)
    answers: list[str] = []
    if probe and checked.loaded is not None:
        from gateway.control.preflight import preflight

        answers, more = preflight(checked.loaded, file)
        findings = sorted(findings + more, key=lambda finding: finding.place.line)
    errors = sum(finding.severity.value == "error" for finding in findings)
    if output == "json":
        print_json([finding.as_json() for finding in findings])
    else:
        for finding in findings:
            print(finding.excerpt())
        counts = f"{_count(errors, 'error')}, {_count(len(findings) - errors, 'warning')}"
        print(" · ".join([f"{file}: {counts}", *answers]))
    raise typer.Exit(Exit.INVALID_CONFIG if errors else Exit.OK)


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")


def _usable(file: Path) -> Loaded:
    """Return the configuration; print what is wrong with it, and leave when it cannot be used."""
    from gateway.config.load import check_file

    checked = check_file(file)
    for finding in checked.findings:
        print(finding.excerpt(), file=sys.stderr)
    if checked.loaded is None:
        raise typer.Exit(Exit.INVALID_CONFIG)
    return checked.loaded


@config_app.command("schema", epilog="Example: vllm-gateway config schema > gateway.schema.json")
def config_schema() -> None:
    """Print the JSON Schema of the settings file, for editors."""
    from gateway.config.schema import json_schema

    print_json(json_schema())


@config_app.command("show", epilog="Example: vllm-gateway config show -c gateway.yaml --origin")
def config_show(
    config: ConfigFile = DEFAULT_FILE,
    origin: Annotated[bool, typer.Option("--origin", help="Say where each comes from.")] = False,
    output: AsTable = "table",
) -> None:
    """Print every setting in force, defaults too. Secrets are hidden."""
    from gateway.config.spell import flat, spell

    loaded = _usable(config)
    if output == "json" and not origin:
        print_json(spell(loaded.config))
        return
    rows = [
        {"setting": name, "value": value, "origin": loaded.told_in(path)}
        for path, name, value in flat(loaded.config)
    ]
    if output == "json":
        print_json(rows)
        return
    for row in rows:
        note = f"  # {row['origin']}" if origin else ""
        print(f"{row['setting']}: {json.dumps(row['value'], ensure_ascii=False)}{note}")


# --- keys -----------------------------------------------------------------------------------------


@keys_app.command("create", epilog="Example: vllm-gateway keys create ci -c gw.yaml --expires 30d")
def keys_create(  # noqa: PLR0913 - the options of a verb
    name: Annotated[str, typer.Argument(help="Whom it is for.")],
    config: ConfigFile = DEFAULT_FILE,
    models: Annotated[
        list[str] | None, typer.Option(help="Models it may use, as a glob. Repeatable.")
    ] = None,
    max_context: Annotated[
        str | None, typer.Option(help="Most tokens of prompt and output: 32k.")
    ] = None,
    max_output: Annotated[str | None, typer.Option(help="Most tokens of output: 4k.")] = None,
    expires: Annotated[str | None, typer.Option(help="When it ends: 30d, 12h.")] = None,
    tenant: Annotated[
        str | None, typer.Option(help="Whose share of a queue it uses. Default: its name.")
    ] = None,
    priority: Annotated[int, typer.Option(help="Its band; the higher goes first.")] = 0,
    output: AsTable = "table",
) -> None:
    """Create a key and print it, this once. Makes the keys file if there is none."""
    from gateway.access import keys
    from gateway.config.units import parse_duration, parse_tokens

    created = keys.create(
        _keys_file(config),
        name=name,
        tenant=tenant,
        priority=priority,
        models=tuple(models or ("*",)),
        max_context_tokens=_option("--max-context", parse_tokens, max_context),
        max_output_tokens=_option("--max-output", parse_tokens, max_output),
        expires_in_s=_option("--expires", parse_duration, expires),
    )
    _print_key(created, output)


@keys_app.command("list", epilog="Example: vllm-gateway keys list -c gateway.yaml -o json")
def keys_list(config: ConfigFile = DEFAULT_FILE, output: AsTable = "table") -> None:
    """List the keys: who, what they may use, until when. Never the keys themselves."""
    from gateway.access.keys import list_keys
    from gateway.ops.report import key_rows

    rows = key_rows(list_keys(_keys_file(config)))
    if output == "json":
        print_json(rows)
    else:
        print_table(rows)


@keys_app.command("revoke", epilog="Example: vllm-gateway keys revoke k7m2q9xd -c gateway.yaml")
def keys_revoke(
    key_id: Annotated[str, typer.Argument(metavar="ID")], config: ConfigFile = DEFAULT_FILE
) -> None:
    """End a key for good."""
    from gateway.access import keys

    file = _keys_file(config, key_id)
    keys.revoke(file, key_id)
    print(f"{key_id} is revoked", file=sys.stderr)


@keys_app.command("rotate", epilog="Example: vllm-gateway keys rotate k7m2q9xd --grace 24h")
def keys_rotate(
    key_id: Annotated[str, typer.Argument(metavar="ID")],
    config: ConfigFile = DEFAULT_FILE,
    grace: Annotated[str, typer.Option(help="How long the old one still works.")] = "24h",
    output: AsTable = "table",
) -> None:
    """Create a key with the same settings; the old one ends after the grace."""
    from gateway.access import keys
    from gateway.config.units import parse_duration

    file = _keys_file(config, key_id)
    grace_s = _option("--grace", parse_duration, grace)
    _print_key(keys.rotate(file, key_id, grace_s or 0.0), output)


def _keys_file(config: Path, key_id: str = "") -> Path:
    """Return the keys file of a settings file, which may be wrong elsewhere."""
    from gateway.access.keys import list_keys
    from gateway.config.load import check_file

    checked = check_file(config)
    wrong = [f for f in checked.findings if f.severity.value == "error" and "keys" in f.path[:1]]
    if checked.partial is None or wrong:
        _usable(config)
        raise typer.Exit(Exit.INVALID_CONFIG)
    if checked.partial.keys is None:
        hint = "write `keys: {file: keys.yaml}` in it"
        raise VerbError(f"{config} has `keys: none`: it asks for none", hint, Exit.INVALID_CONFIG)
    file = checked.partial.keys.file
    if key_id and all(key.id != key_id for key in list_keys(file)):
        hint = f"see `vllm-gateway keys list -c {config}`"
        raise VerbError(f"no key has the id {key_id}", hint, Exit.NOT_FOUND)
    return file


def _option(name: str, parse: Callable[[object], Number], text: str | None) -> Number | None:
    try:
        return None if text is None else parse(text)
    except ValueError as error:
        raise VerbError(f"{name}: {error}", code=Exit.USAGE) from error


def _print_key(created: CreatedKey, output: str) -> None:
    if output == "json":
        print_json({"id": created.id, "key": created.key})
        return
    print(created.key)
    print(f"The key {created.id} is shown this once; only its hash is kept.", file=sys.stderr)


# --- looking --------------------------------------------------------------------------------------

app.command(epilog="Example: vllm-gateway status --exit-code || page-someone")(verbs.status)
app.command(epilog="Example: vllm-gateway explain req_5f0c9a1b00000042")(verbs.explain)
app.command(epilog="Example: vllm-gateway route --model qwen3-8b --tokens 32k")(verbs.route)

# --- operating ------------------------------------------------------------------------------------

app.command(epilog="Example: vllm-gateway drain qwen3-8b/b2 --wait")(operating.drain)
app.command(epilog="Example: vllm-gateway undrain qwen3-8b/b2")(operating.undrain)
app.command(epilog="Example: vllm-gateway restart qwen3-8b/b2 --dry-run")(operating.restart)
app.command(epilog="Example: vllm-gateway logs qwen3-8b/b2 | vllm-gateway diagnose -")(
    operating.logs
)
app.command(epilog="Example: vllm-gateway hold --for 30m --reason 'driver upgrade'")(operating.hold)
app.command(epilog="Example: vllm-gateway events --limit 5")(operating.events)

# --- before anything runs -------------------------------------------------------------------------

app.command(epilog="Example: docker logs vllm 2>&1 | vllm-gateway diagnose -")(diagnose)
app.command(epilog="Example: vllm-gateway plan ./Qwen3-8B --gpu-memory 24GiB --tp 2")(plan)
