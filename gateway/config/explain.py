"""Validation errors in the operator's words: what is wrong, and the nearest thing that is right."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final, get_args, get_origin

from pydantic_core import ErrorDetails

from gateway.config.findings import KeyPath, Remark, dotted
from gateway.config.keysettings import TIER_NAME
from gateway.config.models import Config
from gateway.config.names import BACKEND_NAME, HEADER_NAME, MODEL_NAME
from gateway.config.process import TOKEN_NAME
from gateway.config.supervision import CONTAINER, KUBERNETES, UNIT
from gateway.config.traces import FIELD_NAME
from gateway.config.traffic import REVISION
from gateway.config.units import Section, as_written
from gateway.core.printable import count

OWN_WORDS: Final = "own_words"  # of an error whose message goes on behind the name: "must be ..."
_NAMES: Final = {
    MODEL_NAME: "use up to 128 letters, digits and . _ : / - and start with a letter or digit",
    BACKEND_NAME: "use up to 63 lower-case letters, digits and - and start with a letter or digit",
    HEADER_NAME: "use up to 64 letters, digits and _ -",
    FIELD_NAME: "it must look like `x-api-key`",
    TIER_NAME: "use up to 64 letters, digits and . _ - and start with a letter or digit",
    REVISION: "use up to 63 letters, digits and . _ - and start with a letter or digit",
    TOKEN_NAME: "use up to 64 letters, digits and . _ @ - and start with a letter or digit",
    UNIT: "it must look like `vllm@1.service`",
    CONTAINER: "it must look like `vllm-1`",
    KUBERNETES: "it must look like `ml/vllm-0`, `ml/deployment/qwen` or `ml/statefulset/qwen`",
}
_WANTED: Final = {
    "model_type": "a mapping",
    "dict_type": "a mapping",
    "tuple_type": "a list",
    "string_type": "text",
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "path_type": "a path",
}
_SIMPLE: Final = {"extra_forbidden": "is not known here", "missing": "is missing"}
_BOUNDS: Final = {
    "greater_than": ("gt", "more than"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "less than"),
    "less_than_equal": ("le", "at most"),
}

_LENGTHS: Final = {
    "string_too_long": ("max_length", "at most"),
    "string_too_short": ("min_length", "at least"),
}


def explain(error: ErrorDetails) -> Remark:
    """Turn one validation error into a remark on a path of the file."""
    is_key = error["loc"][-1:] == ("[key]",)
    path: KeyPath = error["loc"][:-1] if is_key else error["loc"]
    where, kind, context = dotted(path), error["type"], error.get("ctx", {})
    written = error["input"]
    if kind == "extra_forbidden":
        return _unknown_key(path)
    if kind == "missing":
        inside = f" in {dotted(path[:-1])}" if len(path) > 1 else ""
        return Remark(path, "missing-key", f"`{path[-1]}` is missing{inside}")
    if kind in _WANTED:
        empty = "is empty; it " if written is None else ""
        return Remark(path, "wrong-type", f"{where} {empty}{in_words(error)}", _how(path, error))
    if kind in ("enum", "literal_error"):
        known = _known_values(context)
        if written in known:  # `"1"`, where 1 is meant
            message = f"{where} is text; it must be a number"
            return Remark(path, "bad-value", message, f"write {written} without quotes")
        hint = _did_you_mean(str(written), known) or f"known: {', '.join(known)}"
        message = f"{where}: `{as_written(written)}` is not a known value"
        return Remark(path, "bad-value", message, hint)
    if kind == "string_pattern_mismatch":
        hint = _NAMES.get(context["pattern"], f"it must match {context['pattern']}")
        message = f"`{written}` is not a valid name"
        return Remark(path, "bad-name", message if is_key else f"{where}: {message}", hint)
    if kind in _BOUNDS:
        return Remark(path, "out-of-range", f"{where} {in_words(error)}", _how(path, error))
    if kind == "too_short":
        return Remark(path, "out-of-range", f"{where} needs at least one entry")
    code = kind.replace("_", "-") if kind in _OWN else "bad-value"
    if kind in _LENGTHS:
        return Remark(path, code, f"{where} {in_words(error)}")
    return Remark(path, code, f"{where}: {error['msg']}" if where else error["msg"])


def in_words(error: ErrorDetails) -> str | None:
    """Return what a value must be, to be read behind its name; None where an error has words of its own."""
    kind, context = error["type"], error.get("ctx", {})
    if kind in _WANTED:
        return f"must be {_WANTED[kind]}"
    if kind in _BOUNDS:
        if str(error.get("input")).strip().lstrip("+-").lower() == "nan":
            return "must be a number"
        bound, words = _BOUNDS[kind]
        return f"must be {words} {str(context[bound]).removesuffix('.0')}"
    if kind in ("enum", "literal_error"):
        return f"must be one of {', '.join(_known_values(context))}"
    if kind == OWN_WORDS:
        return error["msg"]
    if kind in _LENGTHS:
        bound, words = _LENGTHS[kind]
        return f"must have {words} {count(context[bound], 'character')}"
    if kind == "json_invalid":
        return f"is not JSON ({context['error']})"
    return _SIMPLE.get(kind)


def _how(path: KeyPath, error: ErrorDetails) -> str:
    """Return how to write what was meant, where that is clear."""
    kind, written = error["type"], error["input"]
    if path == ("keys",):
        return "write `keys: {file: keys.yaml}`, or `keys: none` for no authentication"
    if kind == "string_type" and isinstance(written, int | float):
        return "put it in quotes"
    if kind == "tuple_type" and isinstance(written, str | int | float):
        return "write it as a list, in brackets: [a, b]"
    is_share = kind == "less_than_equal" and error["ctx"]["le"] == 1
    if is_share or (kind == "float_parsing" and str(written).strip().endswith("%")):
        return "write 95 % as 0.95"
    return ""


def _known_values(context: Mapping[str, Any]) -> list[str]:
    return re.findall(r"'([^']*)'", context["expected"]) or [str(context["expected"])]


# Kinds of our own errors that become the code of a finding; any other kind is a `bad-value`.
_OWN: Final = frozenset(
    ["needs_unit", "bad_duration", "bad_size", "bad_tokens", "bad_address", "bad_url"]
    + ["bad_socket", "one_of", "empty", "too_small", "bad_parameter"]
)


def _unknown_key(path: KeyPath) -> Remark:
    section, key = section_at(path[:-1]), str(path[-1])
    inside = f" in {dotted(path[:-1])}" if len(path) > 1 else ""
    message = f"unknown key `{key}`{inside}"
    known = list(section.model_fields)
    hint = _did_you_mean(key, known)
    if not hint:
        hint = _belongs_elsewhere(section, key) or f"known: {', '.join(known)}"
    return Remark(path, "unknown-key", message, hint)


def _did_you_mean(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word.lower().replace("-", "_"), list(known), n=1)
    return f"did you mean `{close[0]}`?" if close else ""


def _belongs_elsewhere(section: type[Section], key: str) -> str:
    """Name the section one level down, or at the root, that has the key."""
    for owner in (section, Config):
        for name, field in owner.model_fields.items():
            inner = _section_in(field.annotation)
            if (
                inner is not None
                and get_origin(field.annotation) is not dict
                and key in inner.model_fields
            ):
                return f"it belongs under `{name}`"
    if key in Config.model_fields:
        return "it belongs at the top level"
    return ""


def section_at(path: KeyPath) -> type[Section]:
    """Return the section that a path of the file is in."""
    section: type[Section] = Config
    by_name = False  # the next part is a name the operator chose
    for part in path:
        if isinstance(part, int) or by_name:
            by_name = False
            continue
        field = section.model_fields.get(part)
        inner = _section_in(field.annotation) if field is not None else None
        if field is None or inner is None:
            break
        section, by_name = inner, get_origin(field.annotation) is dict
    return section


def _section_in(annotation: Any) -> type[Section] | None:
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    found = (_section_in(argument) for argument in get_args(annotation))
    return next(filter(None, found), None)
