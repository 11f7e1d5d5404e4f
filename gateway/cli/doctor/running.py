"""What the running gateway may do: asked of its admin listener, for its limits may differ from a shell's."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from gateway.cli.console import VerbError, fetch
from gateway.cli.doctor.findings import Finding
from gateway.cli.doctor.machine import files_finding, shell_findings
from gateway.config.models import Config
from gateway.config.sockets import PREFIX

_MAX_FDS: Final = re.compile(rb"^process_max_fds ([0-9.e+]+)$", re.MULTILINE)


def running_findings(config: Config, server: str, token: str) -> Iterator[Finding]:
    """Yield whether the gateway at `server` may open enough files; without an answer, what a new one might.

    `server` and `token` are those of the options. Without `server`, it is asked where the file has it listen.
    """
    server, token = whom_to_ask(config, server, token)
    try:
        page = fetch(server, "/metrics", token)
    except VerbError as error:
        yield Finding(verdict="skipped", about="running", told=f"The running gateway was not asked: {error}",
                      change=error.hint or "--server URL --token TOKEN")  # fmt: skip
        yield from shell_findings(config)
        return
    if found := _MAX_FDS.search(page):
        yield files_finding(config, int(float(found[1])), "The running gateway")


def whom_to_ask(config: Config, server: str, token: str) -> tuple[str, str]:
    """Return the address and the token of the gateway to ask: those given, else those of the file."""
    return (server, token) if server else (own_server(config), token or _token(config))


def own_server(config: Config) -> str:
    """Return where the admin listener of a configuration is, as seen from this machine."""
    listens = str(config.admin.listen)
    if listens.startswith(PREFIX):
        return listens
    return f"http://{listens}".replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")


def _token(config: Config) -> str:
    own = config.admin.token
    return "" if own is None else own.get_secret_value()
