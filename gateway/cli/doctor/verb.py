"""`vllm-gateway doctor`: looks at what stands around the gateway, and names the line to change."""

from __future__ import annotations

import glob
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final
from urllib.parse import urlsplit

import typer

from gateway.cli.console import Exit, VerbError, option, print_json
from gateway.cli.doctor.findings import Finding, Verdict
from gateway.cli.settings import DEFAULT_FILE, ConfigFile, usable
from gateway.cli.verbs import AsText, OwnServer, Token

if TYPE_CHECKING:
    from gateway.cli.doctor.replies import Asked
    from gateway.config.models import Config

_SIGNS: Final = {"wrong": "✗", "note": "!", "ok": "✓", "skipped": "-"}
_ORDER: Final = tuple(_SIGNS)


def doctor(  # noqa: PLR0913 - the options of a verb
    config: ConfigFile = DEFAULT_FILE,
    through: Annotated[
        str | None,
        typer.Option(
            help="The URL that clients use, with /v1 or without, such as https://api.example.com."
        ),
    ] = None,
    key: Annotated[
        str, typer.Option(envvar="GATEWAY_KEY", help="An API key: tries a stream of 64 tokens.")
    ] = "",
    model: Annotated[
        str, typer.Option(help="The model of that stream. Default: the first pool.")
    ] = "",
    silent_for: Annotated[
        str,
        typer.Option(
            help="With --key: also ask for one whole reply that takes so long, such as 90s: does the proxy wait for it?"
        ),
    ] = "",
    nginx: Annotated[
        Path | None,
        typer.Option(
            help="nginx's configuration, with what it includes. Default: what `nginx -T` prints."
        ),
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Do not verify the certificate of --through.")
    ] = False,
    server: OwnServer = "",
    token: Token = "",
    output: AsText = "text",
    json_: Annotated[bool, typer.Option("--json", help="The same as -o json.")] = False,
) -> None:
    """Look at proxy, machine and backends, and name what works against the gateway, with the line to change.

    Proxy: nginx's settings, and with --through what clients get. Machine: open files, clocks. Backends: version, flags.
    A backend that the gateway did not launch is asked twice for one token, to see whether it tells what was cached.
    Exit code 8 if something is wrong.
    """
    from gateway.cli.doctor.machine import machine_clock
    from gateway.cli.doctor.replies import Asked
    from gateway.cli.doctor.running import running_findings
    from gateway.cli.doctor.servers import server_findings
    from gateway.config.units import parse_duration

    loaded = usable(config)
    if through is not None:
        _check_url(through)
    silent_s = option("--silent-for", parse_duration, silent_for) if silent_for else 0.0
    asked = Asked(key, model or next(iter(loaded.config.pools)), silent_s)
    findings = [
        *machine_clock(),
        *running_findings(loaded.config, server, token),
        *_nginx(loaded.config, config, nginx),
        *_through(loaded.config, through, asked, insecure=insecure),
        *server_findings(loaded.config),
    ]
    findings.sort(key=lambda finding: _ORDER.index(finding.verdict))
    if json_ or output == "json":
        print_json([asdict(finding) for finding in findings])
    else:
        sys.stdout.write("\n".join(_lines(findings)) + "\n")
    wrong = any(finding.verdict == "wrong" for finding in findings)
    raise typer.Exit(Exit.DEGRADED if wrong else Exit.OK)


def _through(
    config: Config, through: str | None, asked: Asked, *, insecure: bool
) -> Iterator[Finding]:
    from gateway.cli.doctor.site import Site
    from gateway.cli.doctor.through import through_findings

    if through is None:
        yield Finding(verdict="skipped", about="through", told="What clients get through a proxy was not tried",
                      change="--through https://api.example.com")  # fmt: skip
        return
    if config.listen.unix is not None:
        own = Site("http://localhost", socket=str(config.listen.unix))
    else:
        own = Site(f"http://{config.listen}".replace("0.0.0.0", "127.0.0.1"))
    url = through.rstrip("/").removesuffix("/v1")  # the base URL of OpenAI's SDK is meant, too
    yield from through_findings(Site(url, insecure), config, asked, own)


def _check_url(through: str) -> None:
    """Go on when it is a URL that can be asked.

    Raises:
        VerbError: it is none, and why.
    """
    if not through.startswith(("http://", "https://")):
        raise VerbError("--through: a URL begins with http:// or https://", code=Exit.USAGE)
    try:
        parts = urlsplit(through)
        named = parts.hostname is not None and parts.port != 0
    except ValueError as error:
        raise VerbError(f"--through: this is not a URL: {error}", code=Exit.USAGE) from error
    if not named:
        raise VerbError("--through: the URL names no host and port", code=Exit.USAGE)


def _nginx(config: Config, settings: Path, file: Path | None) -> Iterator[Finding]:
    from gateway.cli.doctor.nginxfile import parse
    from gateway.cli.doctor.nginxrules import nginx_findings

    unread: list[Finding] = []
    try:
        text = _printed_by_nginx() if file is None else _printed(file, unread)
        if text is None:
            yield Finding(verdict="skipped", about="nginx", told="There is no nginx here that prints its configuration",
                          change="--nginx FILE, or run this as root where nginx runs")  # fmt: skip
            return
        yield from unread
        root = parse(text, "nginx -T" if file is None else str(file))
        # The nginx of this machine may serve others.
        none: Verdict = "note" if file is None or unread else "wrong"
        yield from nginx_findings(root, config, file=str(settings), none=none)
    except OSError as error:
        raise VerbError(f"{error.filename}: {error.strerror}") from error
    except ValueError as error:
        raise VerbError(f"nginx's configuration cannot be read: {error}") from error


def _printed(main: Path, unread: list[Finding]) -> str:
    """Return a file and those that it includes as `nginx -T` prints them; what cannot be read is added to `unread`."""
    from gateway.cli.doctor.nginxfile import parse

    printed: dict[Path, str] = {}
    waiting = [main]
    for file in waiting:
        if file in printed:
            continue
        try:
            printed[file] = file.read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            if file == main:
                raise
            printed[file] = ""
            told = f"{file} cannot be read: {error.strerror}; what it sets is not known"
            unread.append(Finding(verdict="note", about="nginx", told=told,
                                  change="run this as root where nginx runs"))  # fmt: skip
        if printed[file].startswith("# configuration file "):
            return printed[file]  # nginx printed it, and all files are in it
        for each in parse(printed[file], str(file)).find("include"):
            pattern = str(main.parent / "".join(each.words).strip("\"'"))
            found = sorted(glob.glob(pattern)) if glob.has_magic(pattern) else [pattern]
            waiting += map(Path, found)
    return "".join(f"# configuration file {file}:\n{text}\n" for file, text in printed.items())


def _printed_by_nginx() -> str | None:
    program = shutil.which("nginx")
    if program is None:
        return None
    try:
        ran = subprocess.run(
            [program, "-T", "-q"], capture_output=True, text=True, timeout=10, check=False
        )
    except subprocess.TimeoutExpired:
        return None
    return ran.stdout if ran.returncode == 0 else None


def _lines(findings: list[Finding]) -> Iterator[str]:
    for each in findings:
        place = f"{each.where}: " if each.where else ""
        yield f"{_SIGNS[each.verdict]} {place}{each.told}."
        if each.change:
            yield f"    {each.change}"
    wrong = sum(each.verdict == "wrong" for each in findings)
    yield f"{wrong} wrong, {sum(each.verdict == 'note' for each in findings)} to improve"
