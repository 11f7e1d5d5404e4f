"""The verbs of API keys: create, list, revoke, rotate."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from gateway.cli.console import Exit, VerbError, option, print_json, print_table
from gateway.cli.settings import DEFAULT_FILE, ConfigFile, usable
from gateway.cli.verbs import AsTable, group

if TYPE_CHECKING:
    from gateway.access.keys import CreatedKey

_LONGEST_S: Final = 36_500 * 86_400.0  # the file can write no time after the year 9999

keys_app = group("Create, list, revoke and rotate API keys. Only hashes are kept.")


@keys_app.command("create", epilog="Example: vllm-gateway keys create ci -c gw.yaml --expires 30d")
def keys_create(  # noqa: PLR0913 - the options of a verb
    name: Annotated[str, typer.Argument(help="Who the key is for.")],
    config: ConfigFile = DEFAULT_FILE,
    models: Annotated[
        list[str] | None,
        typer.Option(help="Models the key may use, as a glob. Repeatable. Default: all."),
    ] = None,
    max_context: Annotated[
        str | None, typer.Option(help="Limit on prompt plus output tokens, such as 32k.")
    ] = None,
    max_output: Annotated[
        str | None, typer.Option(help="Limit on output tokens, such as 4k.")
    ] = None,
    expires: Annotated[
        str | None,
        typer.Option(help="How long the key is valid, such as 30d or 12h. Default: no limit."),
    ] = None,
    tenant: Annotated[
        str | None,
        typer.Option(help="Tenant that shares queues fairly with others. Default: the name."),
    ] = None,
    priority: Annotated[
        int, typer.Option(help="Priority; requests with a higher one go first.")
    ] = 0,
    fallback: Annotated[
        bool, typer.Option(help="Whether another pool may answer when the asked one cannot.")
    ] = True,
    output: AsTable = "table",
) -> None:
    """Create a key and print it once. Creates the keys file if needed."""
    from gateway.access import keys
    from gateway.access.records import read_limit, read_name

    if models and not all(each.strip() for each in models):
        hint = "omit it for a key that may use every model"
        raise VerbError("--models: an empty glob matches no model", hint, Exit.USAGE)
    option("NAME", read_name, name)
    created = keys.create(
        _keys_file(config),
        name=name,
        tenant=option("--tenant", read_name, tenant or None),
        priority=priority,
        fallback=fallback,
        models=tuple(models or ("*",)),
        max_context_tokens=option("--max-context", read_limit, max_context),
        max_output_tokens=option("--max-output", read_limit, max_output),
        expires_in_s=option("--expires", _lifetime, expires),
    )
    _print_key(created, output)


@keys_app.command("list", epilog="Example: vllm-gateway keys list -c gateway.yaml -o json")
def keys_list(config: ConfigFile = DEFAULT_FILE, output: AsTable = "table") -> None:
    """List the keys with their owners, limits and expiry. The keys themselves are not shown."""
    from gateway.access.keys import list_keys
    from gateway.cli.report import key_rows

    rows = key_rows(list_keys(_keys_file(config)))
    if output == "json":
        print_json(rows)
    else:
        print_table(rows)


@keys_app.command("revoke", epilog="Example: vllm-gateway keys revoke k7m2q9xd -c gateway.yaml")
def keys_revoke(
    key_id: Annotated[str, typer.Argument(metavar="ID")], config: ConfigFile = DEFAULT_FILE
) -> None:
    """Revoke a key permanently."""
    from gateway.access import keys

    file = _keys_file(config, key_id)
    keys.revoke(file, key_id)
    print(f"key {key_id} is revoked", file=sys.stderr)


@keys_app.command("rotate", epilog="Example: vllm-gateway keys rotate k7m2q9xd --grace 24h")
def keys_rotate(
    key_id: Annotated[str, typer.Argument(metavar="ID")],
    config: ConfigFile = DEFAULT_FILE,
    grace: Annotated[str, typer.Option(help="How long the old key still works.")] = "24h",
    output: AsTable = "table",
) -> None:
    """Create a new key with the same settings. The old key works until --grace has passed."""
    from gateway.access import keys

    file = _keys_file(config, key_id)
    _print_key(keys.rotate(file, key_id, option("--grace", _span, grace)), output)


def _keys_file(config: Path, key_id: str = "") -> Path:
    """Return the keys file of a settings file, which may be wrong elsewhere."""
    from gateway.access.keys import list_keys
    from gateway.config.load import check_file

    checked = check_file(config)
    wrong = [f for f in checked.findings if f.severity.value == "error" and "keys" in f.path[:1]]
    if checked.partial is None or wrong:
        usable(config)
        raise typer.Exit(Exit.INVALID_CONFIG)
    if checked.partial.keys is None:
        hint = "to use keys, write `keys: {file: keys.yaml}`"
        raise VerbError(
            f"authentication is off in {config} (`keys: none`)", hint, Exit.INVALID_CONFIG
        )
    file = checked.partial.keys.file
    if key_id and all(key.id != key_id for key in list_keys(file)):
        hint = f"see `vllm-gateway keys list -c {config}`"
        raise VerbError(f"there is no key with the id {key_id}", hint, Exit.NOT_FOUND)
    return file


def _span(text: object) -> float:
    from gateway.config.units import parse_duration

    seconds = parse_duration(text)
    if seconds > _LONGEST_S:
        raise ValueError("must be at most 36500d (100 years)")
    return seconds


def _lifetime(text: object) -> float:
    seconds = _span(text)
    if seconds < 1.0:  # the file counts in seconds
        raise ValueError("must be at least 1s")
    return seconds


def _print_key(created: CreatedKey, output: str) -> None:
    if output == "json":
        print_json({"id": created.id, "key": created.key})
        return
    print(created.key)
    print(
        f"Save this key (id {created.id}) now: only its hash is stored, and it cannot be shown again.",
        file=sys.stderr,
    )
