"""The command line: every verb and its options.

Each verb imports what it runs when it runs: `--help` and the verbs that only read must start fast.
A failure is one line and a hint; a traceback comes only with -vv or GATEWAY_DEBUG=1.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from pathlib import Path
from typing import Annotated, Final

import typer
import typer.main

from gateway.cli import (
    adapterverbs,
    configverbs,
    keyverbs,
    operating,
    recordverbs,
    simulated,
    usageverbs,
    verbs,
)
from gateway.cli.bundle import bundle
from gateway.cli.console import Exit, VerbError, hint_if_taken, option, print_failure, print_json
from gateway.cli.diagnose import diagnose
from gateway.cli.doctor.verb import doctor
from gateway.cli.initial import init
from gateway.cli.plan import plan
from gateway.cli.policy import config_policy
from gateway.cli.quarantine import quarantine_app
from gateway.cli.settings import DEFAULT_FILE, ConfigFile, named, usable
from gateway.cli.streams import make_ready, written_out
from gateway.cli.top import top
from gateway.cli.verbs import group
from gateway.core.printable import count

app = group("An OpenAI-compatible gateway for your vLLM servers.")
config_app = group("Show the settings in force and their schema.")
app.add_typer(keyverbs.keys_app, name="keys")
app.add_typer(config_app, name="config")
app.add_typer(operating.remedies_app, name="remedies")
app.add_typer(adapterverbs.adapters_app, name="adapters")
app.add_typer(quarantine_app, name="quarantine")

AsTable = verbs.AsTable
AsText = verbs.AsText

_command_of = functools.cache(typer.main.get_command)  # reads all verbs: a tenth of a second


def main() -> None:
    """Run the command line and exit with the code of `Exit`."""
    make_ready()
    debug = "-vv" in sys.argv or bool(os.environ.get("GATEWAY_DEBUG"))
    try:
        with written_out():
            _command_of(app)([word for word in sys.argv[1:] if word != "-vv"], "vllm-gateway")
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
    server: Annotated[
        str | None, typer.Option(help="URL of the admin listener, or unix:/path, for every verb.")
    ] = None,
    token: Annotated[
        str | None, typer.Option(help="Token of the admin listener, for every verb.")
    ] = None,
) -> None:
    # What follows reads them where it reads its own options from.
    given = ((verbs.SERVER, server), (verbs.KEYS_SERVER, server), (verbs.TOKEN, token))
    for name, value in given:
        if value is not None:
            os.environ[name] = value


# --- running --------------------------------------------------------------------------------------


# A gateway that was told to stop listens on for `shutdown.announce`.
_TAKEN: Final = (
    "another program listens there, or a gateway that still stops;"
    " `vllm-gateway upgrade` takes over from one that runs"
)
SettingsFile = Annotated[
    Path | None,
    typer.Argument(help="The settings file; or --config.", show_default=False, readable=False),
]


@app.command(epilog="Example: vllm-gateway serve -c gateway.yaml")
def serve(
    context: typer.Context,
    file: SettingsFile = None,
    config: ConfigFile = DEFAULT_FILE,
    workers: Annotated[
        int | None,
        typer.Option(
            min=1, max=64, help="Processes that serve, best one for each core. Default: `workers`."
        ),
    ] = None,
) -> None:
    """Run the gateway. SIGHUP reloads the settings; SIGTERM finishes running requests and exits.

    SIGUSR2 has a new process take over, like `upgrade`.
    """
    from gateway.store.group import VARIABLE
    from gateway.upgrade.predecessor import GaveUp, Predecessor

    file = named(context, file, config)
    predecessor = Predecessor.of(os.environ)
    if predecessor is None and VARIABLE not in os.environ:
        usable(file)  # with source lines; the server itself would log one line each
    from gateway.app import serve as run
    from gateway.workers.parent import NotStarted

    try:
        with hint_if_taken(_TAKEN):
            run(file, predecessor, workers)
    except GaveUp as error:
        raise VerbError(str(error)) from error
    except NotStarted as error:
        wrong = error.exit_code == Exit.INVALID_CONFIG  # it exits like one process alone
        raise VerbError(str(error), code=Exit.INVALID_CONFIG if wrong else Exit.FAILURE) from error


app.command(epilog="Example: vllm-gateway demo --traffic --fault stall_after:5")(simulated.demo)
app.command(epilog="Example: vllm-gateway sim --port 8001 --model qwen3-8b --adapter sql")(
    simulated.sim
)

# --- settings -------------------------------------------------------------------------------------


@app.command(epilog="Example: vllm-gateway check gateway.yaml --probe")
def check(  # noqa: PLR0913 - the options of a verb
    context: typer.Context,
    file: SettingsFile = None,
    config: ConfigFile = DEFAULT_FILE,
    probe: Annotated[
        bool, typer.Option("--probe", help="Also query the backends and Redis.")
    ] = False,
    fit: Annotated[
        bool, typer.Option("--fit", help="Also check that launched models fit on their GPUs.")
    ] = False,
    gpu_memory: Annotated[
        str | None,
        typer.Option(help="Memory of one GPU, such as 24GiB. Default: as the driver reports."),
    ] = None,
    output: AsText = "text",
) -> None:
    """Report every problem in a settings file. Exit code 3 if it cannot be used."""
    from gateway.config.load import check_file

    if gpu_memory is not None and not fit:
        raise VerbError("--gpu-memory says what --fit compares with: use both", code=Exit.USAGE)
    file = named(context, file, config)
    checked = check_file(file)
    findings = list(checked.findings)
    answers: list[str] = []
    # A mistake in the file does not hide those in the files it names.
    if checked.partial is not None:
        from gateway.cli.files import file_findings

        findings += file_findings(checked.partial, file, checked.wrong())
    if (probe or fit) and checked.loaded is None:
        answers.append("nothing was asked, as the file has errors")
    if probe and checked.loaded is not None:
        from gateway.cli.preflight import preflight

        answers, more = preflight(checked.loaded, file)
        findings += more
    if fit and checked.loaded is not None:
        from gateway.config.units import parse_size
        from gateway.sizing.fitcheck import fit_findings

        memory = None if gpu_memory is None else option("--gpu-memory", parse_size, gpu_memory)
        judged, more = fit_findings(checked.loaded, file, memory)
        answers, findings = answers + judged, findings + more
    findings.sort(key=lambda finding: finding.place.line)
    errors = sum(finding.severity.value == "error" for finding in findings)
    if output == "json":
        print_json([finding.as_json() for finding in findings])
    else:
        for finding in findings:
            print(finding.excerpt())
        counts = f"{count(errors, 'error')}, {count(len(findings) - errors, 'warning')}"
        print(" · ".join([f"{file}: {counts}", *answers]))
    raise typer.Exit(Exit.INVALID_CONFIG if errors else Exit.OK)


@config_app.command("schema", epilog="Example: vllm-gateway config schema > gateway.schema.json")
def config_schema() -> None:
    """Print the JSON Schema of the settings file, for use in editors."""
    from gateway.config.schema import json_schema

    print_json(json_schema())


@config_app.command("show", epilog="Example: vllm-gateway config show -c gateway.yaml --origin")
def config_show(
    config: ConfigFile = DEFAULT_FILE,
    origin: Annotated[
        bool, typer.Option("--origin", help="Show where each value comes from.")
    ] = False,
    output: AsTable = "table",
) -> None:
    """Print every setting in force, including defaults. Secrets are hidden."""
    from gateway.config.spell import flat, spell
    from gateway.heal.overrides import in_force

    loaded = usable(config)
    if output == "json" and not origin:
        print_json(spell(loaded.config))
        return
    rows = [
        {"setting": name, "value": value, "origin": loaded.told_in(path)}
        for path, name, value in flat(loaded.config)
    ]
    rows += in_force(loaded.config)
    if output == "json":
        print_json(rows)
        return
    for row in rows:
        note = f"  # {row['origin']}" if origin else ""
        print(f"{row['setting']}: {json.dumps(row['value'], ensure_ascii=False)}{note}")


config_app.command("policy", epilog="Example: vllm-gateway config policy --pool qwen3-8b")(
    config_policy
)

for _verb in (
    configverbs.effective,
    configverbs.validate,
    configverbs.diff,
    configverbs.reload,
    configverbs.history,
):
    _example = f"Example: vllm-gateway config {_verb.__name__} --server http://10.0.0.5:9090"
    config_app.command(epilog=_example)(_verb)

# --- looking --------------------------------------------------------------------------------------

app.command(epilog="Example: vllm-gateway status --exit-code || page-someone")(verbs.status)
app.command(epilog="Example: vllm-gateway requests --errors")(verbs.requests)
app.command(epilog="Example: vllm-gateway top --once")(top)
app.command(epilog="Example: vllm-gateway explain --last-error")(verbs.explain)
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
app.command(epilog="Example: vllm-gateway reload --dry-run")(configverbs.reload)
app.command(epilog="Example: vllm-gateway upgrade")(operating.upgrade)
app.command(epilog="Example: vllm-gateway audit --limit 5")(recordverbs.audit)
app.command(epilog="Example: vllm-gateway replicas -o json")(recordverbs.replicas)
app.command(epilog="Example: vllm-gateway usage --from 2026-11-01 --by tenant -o csv")(
    usageverbs.usage
)

# --- before anything runs -------------------------------------------------------------------------

app.command(epilog="Example: vllm-gateway init --from http://10.0.0.11:8000")(init)
app.command(epilog="Example: docker logs vllm 2>&1 | vllm-gateway diagnose -")(diagnose)
app.command(epilog="Example: vllm-gateway bundle --log gateway.log")(bundle)
app.command(epilog="Example: vllm-gateway doctor --through https://api.example.com")(doctor)
app.command(epilog="Example: vllm-gateway plan ./Qwen3-8B --gpu-memory 24GiB --tp 2")(plan)
