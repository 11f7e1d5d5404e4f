"""The command line as Markdown: `python -m gateway.cli.reference > deploy/COMMANDS.md`."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from typing import Any, Final

import typer

from gateway.cli.main import app

_HEAD: Final = """\
# Commands

Made from the command line itself: `python -m gateway.cli.reference > deploy/COMMANDS.md`. `vllm-gateway VERB --help`
tells the same.

- Verbs that ask a running gateway take `--server` and `--token`, or `GATEWAY_ADMIN_URL` and `GATEWAY_ADMIN_TOKEN`.
  Without them they ask `http://127.0.0.1:9090`. Verbs that read the settings take `-c FILE`, or `GATEWAY_CONFIG`.
- `-o json` prints for programs. Results go to standard output, everything else to standard error. `NO_COLOR` is
  respected.
- `-vv` anywhere, or `GATEWAY_DEBUG=1`, shows tracebacks.

| exit code | what it says |
|---|---|
| 0 | done |
| 1 | it failed; the message says why, and what to do |
| 2 | wrong use of the command line |
| 3 | the settings cannot be used |
| 4 | there is no such thing |
| 5 | it is refused: the token may not do that, or the gateway cannot, or the last backend would go |
| 8 | `status --exit-code`: something is degraded or down; `doctor`: something is wrong |
| 130 | Ctrl-C ended it |
"""


def reference() -> str:
    """Return the page: one part for each verb, in the order of `--help`."""
    lines = [_HEAD]
    root = typer.main.get_command(app)
    for name, verb in _verbs(root, "vllm-gateway"):
        lines += _part(name, verb)
    return "\n".join(lines).rstrip() + "\n"


def _verbs(group: Any, path: str) -> Iterator[tuple[str, Any]]:
    for name, each in group.commands.items():
        own = f"{path} {name}"
        if hasattr(each, "commands"):
            yield from _verbs(each, own)
        else:
            yield own, each


def _part(name: str, verb: Any) -> Iterator[str]:
    shown = [each for each in verb.params if not getattr(each, "hidden", False)]
    arguments = [each for each in shown if each.param_type_name == "argument"]
    options = [each for each in shown if each.param_type_name == "option"]
    words = " ".join(_argument(each) for each in arguments)
    yield f"## `{name} {words}".rstrip() + "`"
    yield ""
    yield " ".join(verb.help.split())
    yield ""
    if arguments or options:
        yield "| option | default | what it does |"
        yield "|---|---|---|"
    for each in arguments:
        yield f"| {_code(_argument(each))} | {_default(each)} | {_told(each)} |"
    for each in options:
        names = " ".join(_code(one) for one in [*each.opts, *each.secondary_opts])
        yield f"| {names} | {_default(each)} | {_told(each)} |"
    yield ""
    if verb.epilog:
        example = re.sub(r"^Example: (.*)$", r"    \1", verb.epilog)
        yield example
        yield ""


def _argument(each: Any) -> str:
    name = (each.metavar or each.name or "").upper().strip("[]{}")
    return f"{name}..." if each.nargs == -1 else name


def _default(each: Any) -> str:
    value = each.default
    if each.required:
        return "**required**"
    if value is None or value is False or callable(value) or value in ("", [], ()):
        return ""
    return _code(str(getattr(value, "value", value)))


def _told(each: Any) -> str:
    told = (each.help or "").replace("|", "\\|")
    variable = each.envvar if isinstance(each.envvar, str) else ""
    return f"{told} (`{variable}`)".strip() if variable else told


def _code(text: str) -> str:
    return f"`{text}`"


if __name__ == "__main__":
    sys.stdout.write(reference())
