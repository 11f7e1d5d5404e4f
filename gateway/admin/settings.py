"""The configuration: what is in force and why, what the file would change, and the order to reload it.

The file is the truth: nothing here writes it. A text that is sent is only checked and compared. What its
references stand for is shown nowhere: a comparison takes only those that are in force at the same place.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, Final

from pydantic import Field
from typing_extensions import TypedDict

from gateway.admin.audit import line_told
from gateway.admin.desk import Desk
from gateway.admin.endpoint import (
    Asked,
    Body,
    DryRunBody,
    DryRunQuery,
    Listing,
    ListQuery,
    Problem,
    Query,
)
from gateway.config.findings import dotted
from gateway.config.identity import keep_names, names_of
from gateway.config.load import Checked, Loaded, check_file, check_text
from gateway.config.reload import diff, digest, opened
from gateway.config.spell import HIDDEN, flat

TEXT_BYTES: Final = 256 * 1024  # of a body with the text of a configuration


class SettingInForce(TypedDict):
    """One setting; `origin` is `line 12`, with what it refers to, or `default`.

    Secrets are hidden, and so is what references stand for.
    """

    setting: str
    value: Any
    origin: str


class ConfigTold(TypedDict):
    """The configuration in force, with every default."""

    file: str | None
    hash: str
    settings: list[SettingInForce]


class FindingTold(TypedDict):
    """One thing that is wrong or doubtful."""

    file: str
    line: int
    column: int
    severity: str
    code: str
    message: str
    hint: str


class ValidatedTold(TypedDict):
    """Whether a configuration could be put in force."""

    valid: bool
    findings: list[FindingTold]


class DiffTold(ValidatedTold):
    """What a configuration would change of the one in force, in sentences; none: nothing."""

    effect: list[str]
    needs_restart: bool


class ReloadTold(TypedDict):
    """What came of a reload, or would."""

    reloaded: bool
    hash: str
    effect: list[str]
    warnings: list[FindingTold]


class HistoryTold(TypedDict):
    """One try to put a configuration in force; `hash` is of what was in force after it."""

    id: str
    at: str
    by: str
    reason: str
    done: bool
    hash: str
    effect: list[str]
    findings: list[str]


class TextBody(Body):
    """A configuration that is not in force."""

    text: str | None = Field(
        default=None, description="YAML. Null: the file on the gateway's machine, as it is now."
    )


async def get_config(desk: Desk, asked: Asked[Query, Body]) -> ConfigTold:
    """Answer every setting in force."""
    loaded = desk.loaded()
    referring = loaded.referring()
    rows = [
        SettingInForce(
            setting=name,
            # That a variable is empty is no secret, and why a backend refuses the gateway.
            value=HIDDEN if path in referring and value is not None else value,
            origin=loaded.told_in(path),
        )
        for path, name, value in flat(loaded.config)
    ]
    file = None if desk.file is None else str(desk.file)
    return ConfigTold(file=file, hash=digest(loaded.config), settings=rows)


async def validate(desk: Desk, asked: Asked[Query, TextBody]) -> ValidatedTold:
    """Answer what is wrong with a configuration."""
    checked = await _checked(desk, asked.body.text)
    return ValidatedTold(valid=checked.loaded is not None, findings=_findings(checked))


async def get_diff(desk: Desk, asked: Asked[Query, TextBody]) -> DiffTold:
    """Answer what a configuration would change."""
    checked = await _checked(desk, asked.body.text)
    if checked.loaded is not None and asked.body.text is not None:
        _check_references(checked.loaded, desk.loaded())
    effect = _effect(desk, checked)
    return DiffTold(
        valid=checked.loaded is not None,
        findings=_findings(checked),
        effect=effect,
        needs_restart=any(each.startswith("needs a restart") for each in effect),
    )


async def reload(desk: Desk, asked: Asked[DryRunQuery, DryRunBody]) -> ReloadTold:
    """Put the file in force, or say why not (409)."""
    checked = await _checked(desk, None)
    warnings = _findings(checked)
    if asked.dry_run:
        if checked.loaded is None:
            raise _invalid([str(each) for each in checked.findings])
        before, started = desk.loaded().config, desk.reloading.started
        if desk.file and (found := opened(checked.loaded, before, started, desk.file)):
            raise _invalid([str(each) for each in found])
        return ReloadTold(
            reloaded=False,
            hash=digest(checked.loaded.config),
            effect=_effect(desk, checked),
            warnings=warnings,
        )
    done = await desk.reloading.reload(asked.actor.name, asked.body.reason)
    if not done.done:
        raise _invalid(done.findings)
    return ReloadTold(reloaded=True, hash=done.hash, effect=list(done.effect), warnings=warnings)


async def get_history(desk: Desk, asked: Asked[ListQuery, Body]) -> Listing:
    """Answer what was put in force, the newest first."""
    return Listing([*desk.reloading.history.newest()], lambda each: str(each.number), line_told)


async def subject(desk: Desk, names: Mapping[str, str]) -> Mapping[str, Any]:
    """Return which configuration is in force."""
    return {"hash": digest(desk.loaded().config)}


async def _checked(desk: Desk, text: str | None) -> Checked:
    """Check the file, or a text as if it were in its place; a thread reads."""
    file = desk.file
    if file is None:
        raise Problem(HTTPStatus.CONFLICT, "no_file", "This gateway has no configuration file.")
    if text is None:
        return await asyncio.to_thread(check_file, file)
    folder = file.absolute().parent
    return await asyncio.to_thread(check_text, text, file="text", folder=folder, env=os.environ)


def _check_references(wanted: Loaded, in_force: Loaded) -> None:
    """Check that a text that was sent refers to nothing that is not in force at the same place.

    Raises:
        Problem: it does (409). Else a comparison would show what any variable or file holds.
    """
    for path, origin in wanted.origin.items():
        known = in_force.origin.get(path)
        if origin.reference and (known is None or known.reference != origin.reference):
            detail = (
                f"{dotted(path)} has a reference (`${{...}}`) that is not in force there, and what it stands"
                " for is not compared. Put the text into the file on the gateway's machine instead."
            )
            raise Problem(HTTPStatus.CONFLICT, "new_reference", detail)


def _effect(desk: Desk, checked: Checked) -> list[str]:
    if checked.loaded is None:
        return []
    before = desk.loaded()
    wanted = keep_names(checked.loaded, names_of(before)).config
    return list(diff(before.config, wanted, started=desk.reloading.started))


def _findings(checked: Checked) -> list[FindingTold]:
    return [FindingTold(**each.as_json()) for each in checked.findings]  # type: ignore[typeddict-item]


def _invalid(findings: list[str] | tuple[str, ...]) -> Problem:
    detail = (
        "The file is not valid; what was in force stays. The first of its findings:"
        f" {findings[0] if findings else 'none'}"
    )
    errors = [{"pointer": "", "detail": each} for each in findings[:50]]
    return Problem(HTTPStatus.CONFLICT, "config_invalid", detail, errors=errors)
