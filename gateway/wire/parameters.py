"""The parameter policy: the judgement of what a body asks for, by the table.

`wire.measures` says what a body asks for; a row of `wire.table` says how much of it passes. The
configuration changes rows for all pools, for one pool or for one key: the narrowest that names a row
decides. What passes, passes byte for byte.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from gateway.core.asked import Fact, Media, Overrides, UnknownFields
from gateway.core.errors import RequestError
from gateway.core.types import Call
from gateway.wire.objects import fields_of
from gateway.wire.table import TABLE, Row, Rule

UNLIMITED: Final = float("inf")


@dataclass(frozen=True, slots=True)
class Ruling:
    """How much of a row passes, and the setting that says so."""

    most: float
    setting: str


@dataclass(frozen=True, slots=True)
class Policy:
    """The table as it holds for one pool and one key. Build with `effective`."""

    rulings: Mapping[str, Ruling]
    denied: Mapping[str, str]  # further top-level fields, and the setting that denies each
    media: tuple[Media, str]
    unknown_fields: tuple[UnknownFields, str]


def effective(layers: Sequence[tuple[str, Overrides]]) -> Policy:
    """Return the table under overrides, the widest first; each with the path of its setting."""
    where = layers[-1][0] if layers else "parameters"
    rulings = {
        row.name: Ruling(
            float(row.most or 0),
            f"{where}.allow" if row.rule is Rule.DENY else f"{where}.max.{row.name}",
        )
        for row in TABLE.values()
        if row.rule in (Rule.DENY, Rule.MAX)
    }
    denied: dict[str, str] = {}
    media, unknown = (Media.PUBLIC, f"{where}.media"), (UnknownFields.PASS, f"{where}.unknown_fields")  # fmt: skip
    for path, said in layers:
        for name in said.allow:
            denied.pop(name, None)
            if name in rulings:
                rulings[name] = Ruling(UNLIMITED, f"{path}.allow")
        for name, most in said.max:
            denied.pop(name, None)  # by a wider one
            rulings[name] = Ruling(float(most), f"{path}.max.{name}")
        for name in said.deny:
            if name in rulings and "." in name:
                rulings[name] = Ruling(0.0, f"{path}.deny")
            else:
                denied[name] = f"{path}.deny"
        if said.media is not None:
            media = (said.media, f"{path}.media")
        if said.unknown_fields is not None:
            unknown = (said.unknown_fields, f"{path}.unknown_fields")
    return Policy(rulings, denied, media, unknown)


# --- the judgement --------------------------------------------------------------------------------


def judge(call: Call, policy: Policy) -> None:
    """Let a request pass, or refuse it.

    Raises:
        RequestError: 400; names the field, the limit and the setting that decides.
    """
    if policy.denied:
        for name in _names_of(call):
            if name in policy.denied:
                raise _unsupported(name, f"`{policy.denied[name]}` refuses it")
    for fact in call.asked.facts:
        if fact.row == "media":
            _judge_media(fact, policy)
            continue
        if fact.row == "unknown":
            _judge_unknown(fact, policy)
            continue
        ruling = policy.rulings[fact.row]
        if fact.value > ruling.most:
            raise _refusal(TABLE[fact.row], fact, ruling)


def _names_of(call: Call) -> Collection[str]:
    """Return the names of a JSON body's fields; a form has none."""
    if call.places is not None:
        return call.places
    return () if call.model_at is not None else fields_of(call.body)


_MEDIA_ORDER: Final = tuple(Media)


def media_fact(kind: Media, path: str) -> Fact:
    """Return the fact that media have such an address, which the setting `media` judges."""
    return Fact("media", float(_MEDIA_ORDER.index(kind)), path)


def _judge_media(fact: Fact, policy: Policy) -> None:
    most, setting = policy.media
    if fact.value <= _MEDIA_ORDER.index(most):
        return
    raise RequestError(
        f"The address in `{fact.path}` is not accepted: {_TAKEN[most]} (`{setting}` is "
        f"`{most.value}`). Send the media inline as a data: URL.",
        param=fact.path,
        code="unsupported_media_address",
    )


_TAKEN: Final = {
    Media.DATA: "only data: URLs are",
    Media.PUBLIC: "only data: URLs, and http or https to public hosts, are",
    Media.ANY: "",
}


def _judge_unknown(fact: Fact, policy: Policy) -> None:
    what, setting = policy.unknown_fields
    if what is UnknownFields.REFUSE:
        raise RequestError(
            f"`{fact.path}` is not a parameter of this endpoint (`{setting}` is `refuse`). Leave it out.",
            param=fact.path,
            code="unknown_parameter",
        )


def _refusal(row: Row, fact: Fact, ruling: Ruling) -> RequestError:
    if row.rule is Rule.DENY or ruling.most == 0:
        return _unsupported(fact.path, f"{row.why}. Only `{ruling.setting}` can allow it")
    most = f"{ruling.most:.0f}"
    if fact.value == UNLIMITED:
        text = f"`{fact.path}` must be at most {most}; -1, for all, is not accepted"
    else:
        text = (
            f"`{fact.path}` {_EXCEEDS.get(row.name, 'must be at most {most}, got {got}')}".format(
                most=most, got=f"{fact.value:.0f}"
            )
        )
    return RequestError(
        f"{text}. `{ruling.setting}` decides.",
        param=fact.path,
        code=_CODES.get(row.name, "integer_above_max_value"),
    )


def _unsupported(path: str, why: str) -> RequestError:
    return RequestError(
        f"`{path}` is not accepted here: {why}.", param=path, code="unsupported_parameter"
    )


_ENTRIES: Final = "may hold at most {most} entries, got {got}"
_LENGTH: Final = "may have at most {most} characters, got {got}"
_BYTES: Final = "may have at most {most} bytes, got {got}"
_EXCEEDS: Final = {
    **dict.fromkeys(
        ["prompts", "inputs", "logprob_token_ids", "stop", "stop_token_ids", "logit_bias"]
        + ["allowed_token_ids", "bad_words", "choices", "tools", "documents"],
        _ENTRIES,
    ),
    **dict.fromkeys(["stop_chars", "bad_word_chars", "pattern_chars"], _LENGTH),
    **dict.fromkeys(["schema_bytes", "grammar_bytes", "tools_bytes"], _BYTES),
    "sequences": "times the number of prompts must be at most {most}, got {got}",
    "beams": "of a beam search must be at most {most}, got {got}",
    "schema_depth": "may be nested at most {most} deep, got {got}",
    "schema_properties": "may have at most {most} properties in all, got {got}",
    "schema_enum": "may have at most {most} enum values in all, got {got}",
    "schema_multiple": "may have a least common multiple of all `multipleOf` of at most {most}, got {got}",
}
_CODES: Final = {
    **{name: "array_above_max_length" for name, text in _EXCEEDS.items() if text == _ENTRIES},
    **{name: "string_above_max_length" for name, text in _EXCEEDS.items() if text in (_LENGTH, _BYTES)},
    **dict.fromkeys(
        ["schema_depth", "schema_properties", "schema_enum", "schema_multiple"], "invalid_json_schema"
    ),
}  # fmt: skip
