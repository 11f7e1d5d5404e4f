"""The verb that prints the parameter policy: every row, what it does here, and which setting decides."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from gateway.cli.console import Exit, VerbError, print_json, print_table
from gateway.cli.settings import DEFAULT_FILE, ConfigFile, usable
from gateway.cli.verbs import AsTable, id_of

if TYPE_CHECKING:
    from gateway.config.models import Config
    from gateway.core.asked import Overrides
    from gateway.wire.parameters import Policy
    from gateway.wire.table import Row

_COLUMNS: Final = ("parameter", "here", "decided_by", "why")


def config_policy(
    config: ConfigFile = DEFAULT_FILE,
    pool: Annotated[str | None, typer.Option(help="As it holds for this pool.")] = None,
    key: Annotated[str | None, typer.Option(help="And for the key with this id.")] = None,
    output: AsTable = "table",
) -> None:
    """Print what requests may ask for: each limit, why it is there, and the setting that changes it.

    Where there is no settings file, and none is named: the defaults. `-o json` adds endpoints, fields and advisories.
    """
    from gateway.wire.parameters import effective

    is_named = pool or key or config != DEFAULT_FILE
    if is_named or config.exists():
        policy = _policy(usable(config).config, pool, key and id_of(key), config)
    else:
        policy = effective([])
    rows = policy_rows(policy)
    if output == "json":
        print_json(rows)
        return
    print_table([{name: row[name] for name in _COLUMNS} for row in rows])


def _policy(config: Config, pool: str | None, key: str | None, file: Path) -> Policy:
    from gateway.config.parameters import Policies

    if pool is not None and pool not in config.pools:
        hint = f"pools: {', '.join(config.pools)}"
        raise VerbError(f"no pool is called {pool}", hint, Exit.NOT_FOUND)
    overrides = None if key is None else _of_key(config, key, file)
    return Policies(config).of(pool, overrides)


def _of_key(config: Config, key_id: str, file: Path) -> Overrides | None:
    from gateway.access.effective import caller_of
    from gateway.cli.keydesk import KeyDesk

    key = KeyDesk(file).ask(lambda store: store.get(key_id))
    return caller_of(key, config.tiers.get(key.tier or "")).parameters


def policy_rows(policy: Policy) -> list[dict[str, object]]:
    """Return every row of the table as a policy changes it."""
    from gateway.wire.table import TABLE

    rows = [_row(row, policy) for row in TABLE.values()]
    rows.append(
        {
            "parameter": "unknown fields",
            "here": policy.unknown_fields[0].value,
            "decided_by": policy.unknown_fields[1],
            "endpoints": ["all"],
            "fields": [],
            "why": "vLLM ignores them; they are counted in gateway_unknown_fields_total",
            "advisories": [],
        }
    )
    further = [name for name in policy.denied if name not in TABLE]
    rows += [
        {
            "parameter": name,
            "here": "refused",
            "decided_by": policy.denied[name],
            "endpoints": ["all"],
            "fields": [name],
            "why": "by your setting",
            "advisories": [],
        }
        for name in further
    ]
    return rows


def _row(row: Row, policy: Policy) -> dict[str, object]:
    here, decided_by = _here(row, policy)
    return {
        "parameter": row.name,
        "here": here,
        "decided_by": decided_by,
        "endpoints": sorted(each.value for each in row.endpoints) or ["all"],
        "fields": list(row.fields) or [row.name],
        "why": row.why,
        "advisories": row.advisory.split(),
    }


def _here(row: Row, policy: Policy) -> tuple[str, str | None]:
    """Say what a row does, and the setting that says so; None for what nothing changes."""
    from gateway.wire.parameters import UNLIMITED
    from gateway.wire.table import Rule

    if row.name in policy.denied:
        return "refused", policy.denied[row.name]
    if row.rule is Rule.FIXED:
        return "fixed rule", None
    if row.rule is Rule.CHOICE:
        return policy.media[0].value, policy.media[1]
    ruling = policy.rulings[row.name]
    if ruling.most == UNLIMITED:
        return "passes", ruling.setting
    if row.rule is Rule.DENY or ruling.most == 0:
        return "refused", ruling.setting
    return f"at most {ruling.most:.0f}", ruling.setting
