"""The verbs of API keys: create, list, show, effective, update, rotate, revoke, import."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated

import typer

from gateway.cli.console import Exit, VerbError, duration, option, print_json, print_table
from gateway.cli.keydesk import KeyDesk, taken_over
from gateway.cli.keysource import Told, key_row, keys_of
from gateway.cli.settings import DEFAULT_FILE, ConfigFile
from gateway.cli.verbs import KEYS_SERVER, AsTable, Token, group, id_of

keys_app = group("Create, list, change, rotate and revoke API keys. Only hashes are kept.")


Server = Annotated[
    str | None,
    typer.Option(
        envvar=KEYS_SERVER,
        help="URL of the admin listener of a running gateway, whose keys are meant then, not those of -c.",
    ),
]
Id = Annotated[
    str,
    typer.Argument(
        metavar="ID",
        parser=id_of,
        help="The key's id, or the whole key, of which only the id is used.",
    ),
]
Models = Annotated[
    list[str] | None,
    typer.Option(help="Models and adapters the key may use, as a glob. Repeatable. Default: all."),
]
Deny = Annotated[
    list[str] | None,
    typer.Option(help="Models and adapters the key may not use, as a glob. Repeatable."),
]
Address = Annotated[
    list[str] | None,
    typer.Option(help="Client address or network that may use it, such as 10.0.0.0/8. Repeatable."),
]
MaxContext = Annotated[
    str | None, typer.Option(help="Limit on prompt plus output tokens, such as 32k.")
]
MaxOutput = Annotated[str | None, typer.Option(help="Limit on output tokens, such as 4k.")]
Expires = Annotated[
    str | None,
    typer.Option(help="How long the key is valid, such as 30d or 12h. Default: no limit."),
]
Tenant = Annotated[
    str | None,
    typer.Option(help="Tenant that shares queues fairly with others. Default: the name."),
]
Owner = Annotated[str | None, typer.Option(help="Who answers for the key.")]
Priority = Annotated[
    int | None, typer.Option(help="Priority; requests with a higher one go first. Default: 0.")
]
Fallback = Annotated[
    bool | None,
    typer.Option(
        "--fallback/--no-fallback",
        help="Whether another pool may answer when the asked one cannot. Default: it may.",
    ),
]
Limit = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=N",
        help="A limit, such as requests_per_minute=60, input_tokens_per_minute=100k,"
        " output_tokens_per_minute=20k or concurrent_requests=4. Repeatable.",
    ),
]
Tier = Annotated[
    str | None, typer.Option(help="Template of its settings: a name under `tiers` in the settings.")
]
Role = Annotated[
    str | None, typer.Option(help="viewer, operator or admin; of a key of kind admin.")
]
Note = Annotated[
    list[str] | None,
    typer.Option(
        "--metadata", metavar="NAME=TEXT", help="A note of yours, such as team=search. Repeatable."
    ),
]


@keys_app.command("create", epilog="Example: vllm-gateway keys create ci -c gw.yaml --expires 30d")
def keys_create(  # noqa: PLR0913 - the options of a verb
    name: Annotated[str, typer.Argument(help="Who the key is for.")],
    config: ConfigFile = DEFAULT_FILE,
    models: Models = None,
    deny: Deny = None,
    max_context: MaxContext = None,
    max_output: MaxOutput = None,
    expires: Expires = None,
    tenant: Tenant = None,
    owner: Owner = None,
    priority: Priority = None,
    fallback: Fallback = None,
    limit: Limit = None,
    address: Address = None,
    tier: Tier = None,
    kind: Annotated[
        str | None,
        typer.Option(help="inference, admin (may not use models) or metrics. Default: inference."),
    ] = None,
    role: Role = None,
    metadata: Note = None,
    server: Server = None,
    token: Token = "",
    output: AsTable = "table",
) -> None:
    """Create a key and print it once. Creates the keys file if needed."""
    settings = _settings(
        name=name, tenant=tenant or None, owner=owner, kind=kind, role=role, tier=tier,
        models=models, deny=deny, addresses=address, max_context=max_context,
        max_output=max_output, priority=priority, fallback=fallback, limits=_limits(limit),
        metadata=_notes(metadata), expires=_until(expires),
    )  # fmt: skip
    _print_key(keys_of(config, server, token).create(settings), output)


@keys_app.command("update", epilog="Example: vllm-gateway keys update k7m2q9xd --tier gold")
def keys_update(  # noqa: PLR0913 - the options of a verb
    key_id: Id,
    config: ConfigFile = DEFAULT_FILE,
    name: Annotated[str | None, typer.Option(help="Who the key is for.")] = None,
    models: Models = None,
    deny: Deny = None,
    max_context: MaxContext = None,
    max_output: MaxOutput = None,
    expires: Expires = None,
    tenant: Tenant = None,
    owner: Owner = None,
    priority: Priority = None,
    fallback: Fallback = None,
    limit: Limit = None,
    address: Address = None,
    tier: Tier = None,
    role: Role = None,
    metadata: Note = None,
    unset: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="A setting to take away, such as models, limits, tier or expires: the tier's value,"
            " or the default, holds then. Repeatable.",
        ),
    ] = None,
    if_version: Annotated[
        str | None,
        typer.Option(help="Change it only if this is still its version (`keys show` tells it)."),
    ] = None,
    server: Server = None,
    token: Token = "",
    output: AsTable = "table",
) -> None:
    """Change a key's settings. What is not named stays; --limit replaces all limits of the key."""
    changes = _settings(
        name=name, tenant=tenant, owner=owner, role=role, tier=tier,
        models=models, deny=deny, addresses=address, max_context=max_context,
        max_output=max_output, priority=priority, fallback=fallback, limits=_limits(limit),
        metadata=_notes(metadata), expires=_until(expires),
    )  # fmt: skip
    changes |= dict.fromkeys(unset or ())
    if not changes:
        raise VerbError("nothing to change", "name a setting, such as --tier gold", Exit.USAGE)
    keys = keys_of(config, server, token)
    before = keys.get(key_id)
    told = keys.update(key_id, changes, if_version)
    what = "was like that already" if told["version"] == before["version"] else "is changed"
    print(f"key {key_id} {what}; its version is {told['version']}", file=sys.stderr)
    gone = before["settings"].get("limits", {}).keys() - (_limits(limit) or {})
    if limit and gone:
        taken = ", ".join(sorted(gone))
        print(f"taken away: {taken}; --limit replaces all limits of the key", file=sys.stderr)
    if output == "json":
        print_json(told)


@keys_app.command("list", epilog="Example: vllm-gateway keys list -c gateway.yaml -o json")
def keys_list(
    config: ConfigFile = DEFAULT_FILE,
    server: Server = None,
    token: Token = "",
    output: AsTable = "table",
) -> None:
    """List the keys with their owners, limits and expiry. The keys themselves are not shown."""
    rows = [key_row(each) for each in keys_of(config, server, token).list()]
    if output == "json":
        print_json(rows)
        return
    unused = {name for name in ("role", "owner", "tier") if not any(row[name] for row in rows)}
    shown = [{name: row[name] for name in row if name not in unused} for row in rows]
    print_table(shown, empty="no keys")


@keys_app.command("show", epilog="Example: vllm-gateway keys show k7m2q9xd -c gateway.yaml")
def keys_show(
    key_id: Id,
    config: ConfigFile = DEFAULT_FILE,
    server: Server = None,
    token: Token = "",
    output: AsTable = "table",
) -> None:
    """Show what is kept of one key, without its secret."""
    told = keys_of(config, server, token).get(key_id)
    if output == "json":
        print_json(told)
        return
    print_table([{"what": name, "value": value} for name, value in told.items()])


@keys_app.command("effective", epilog="Example: vllm-gateway keys effective k7m2q9xd -c gw.yaml")
def keys_effective(
    key_id: Id,
    config: ConfigFile = DEFAULT_FILE,
    server: Server = None,
    token: Token = "",
    output: AsTable = "table",
) -> None:
    """Show what holds for a key, and whether the key, its tier or a default says so."""
    told = keys_of(config, server, token).effective(key_id)
    if output == "json":
        print_json(told)
        return
    print_table(
        [
            {"setting": name, "value": each["value"], "origin": each["origin"]}
            for name, each in told.items()
        ]
    )


@keys_app.command("revoke", epilog="Example: vllm-gateway keys revoke k7m2q9xd -c gateway.yaml")
def keys_revoke(
    key_id: Id, config: ConfigFile = DEFAULT_FILE, server: Server = None, token: Token = ""
) -> None:
    """Revoke a key permanently."""
    keys_of(config, server, token).revoke(key_id)
    print(f"key {key_id} is revoked", file=sys.stderr)


@keys_app.command("rotate", epilog="Example: vllm-gateway keys rotate k7m2q9xd --grace 24h")
def keys_rotate(
    key_id: Id,
    config: ConfigFile = DEFAULT_FILE,
    grace: Annotated[
        str, typer.Option(help="How long the old secret still works; 0s ends it at once.")
    ] = "24h",
    server: Server = None,
    token: Token = "",
    output: AsTable = "table",
) -> None:
    """Give a key a new secret. Its id, limits and usage stay; the old secret works until --grace has passed."""
    grace_s = option("--grace", duration, grace)
    _print_key(keys_of(config, server, token).rotate(key_id, grace_s), output)


@keys_app.command("import", epilog="Example: vllm-gateway keys import keys.yaml -c gateway.yaml")
def keys_import(
    file: Annotated[
        Path | None,
        typer.Argument(metavar="[FILE]", help="A keys file. Default: `keys.file` of the settings."),
    ] = None,
    config: ConfigFile = DEFAULT_FILE,
) -> None:
    """Take the keys of a file over to the keys that gateways share (`keys.shared`); keys stay valid.

    Keys that are there already stay as they are there. The file is only read.
    """
    if os.environ.get(KEYS_SERVER):
        hint = "run it where the file is, with -c and the settings of the gateway"
        raise VerbError("a file of keys cannot be taken over through --server", hint, Exit.USAGE)
    desk = KeyDesk(config)
    records = desk.of_file(file)
    there = desk.ask(lambda store: taken_over(store, records))
    differ = [other.id for record, other in there if other.version != record.version]
    print(
        f"{len(records) - len(there)} keys are taken over, {len(there)} were there", file=sys.stderr
    )
    if differ:
        print(f"different there, and left so: {', '.join(differ)}", file=sys.stderr)


# --- options ----------------------------------------------------------------------------------------


def _settings(**told: object) -> dict[str, object]:
    """Return the settings that are told, as the store takes them."""
    return {name: value for name, value in told.items() if value is not None}


def _limits(listed: Iterable[str] | None) -> Mapping[str, str] | None:
    return _pairs("--limit", listed, "requests_per_minute=60")


def _notes(listed: Iterable[str] | None) -> Mapping[str, str] | None:
    return _pairs("--metadata", listed, "team=search")


def _pairs(name: str, listed: Iterable[str] | None, example: str) -> Mapping[str, str] | None:
    """Return what is written as `NAME=VALUE`, several with commas, as a mapping.

    Raises:
        VerbError: some is not.
    """
    every = [pair for text in listed or () for pair in text.split(",")]
    for each in every:
        if each.find("=") < 1:
            raise VerbError(f"{name}: write it like {example}, not {each}", code=Exit.USAGE)
    return dict(each.partition("=")[::2] for each in every) or None


def _until(expires: str | None) -> str | None:
    from gateway.access.records import timestamp

    if expires is None:
        return None
    return timestamp(time.time() + option("--expires", _lifetime, expires))


def _lifetime(text: str) -> float:
    seconds = duration(text)
    if seconds < 1.0:  # a record counts in seconds
        raise ValueError("must be at least 1s")
    return seconds


# --- printing ---------------------------------------------------------------------------------------


def _print_key(made: Told, output: str) -> None:
    if output == "json":
        print_json({"id": made["id"], "key": made["key"]})
        return
    print(made["key"], flush=True)  # it may not be possible
    print(
        f"Save this key (id {made['id']}) now: only its hash is stored, and it cannot be shown again.",
        file=sys.stderr,
    )
