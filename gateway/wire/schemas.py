"""What a schema, pattern or grammar costs its compiler: size, depth, properties, enum values."""

from __future__ import annotations

import math
import re
from decimal import Decimal
from typing import Any, Final

import msgspec
from msgspec import Raw

from gateway.core.asked import Fact
from gateway.core.errors import RequestError
from gateway.wire.lax import is_on
from gateway.wire.objects import begins, decode_or_none, fields_once, items_if_list, items_of
from gateway.wire.patterns import pattern_problem

_VALUE: Final = msgspec.json.Decoder()
_TEXT: Final = msgspec.json.Decoder(str)
_QUOTE, _LIST, _OBJECT, _NULL = b'"[{n'
_NONE: Final = Raw(b"null")
# Of all patterns of one schema; the default of `pattern_chars` is 2,048 for one.
_MOST_PATTERN_CHARS: Final = 16_384
_MOST_READ: Final = 4 * 1024 * 1024  # bytes of a schema that are looked into; no limit is larger
_MOST_MULTIPLE: Final = 10**18  # as good as any number beyond
# In this a schema tells llguidance more. vLLM asks that where xgrammar cannot.
_GUIDANCE: Final = "x-guidance"
_WHITESPACE: Final = "whitespace_pattern"
_WHITESPACE_ROW: Final = f"structured_outputs.{_WHITESPACE}"


def schema_facts(raw: Raw, path: str, facts: list[Fact]) -> None:
    """Measure one schema, given as an object or as its text.

    Raises:
        RequestError: 400; a pattern in it cannot be compiled cheaply, or a text is no JSON.
    """
    if begins(raw) == _NULL:
        return
    facts.append(Fact("schema_bytes", float(len(raw)), path))
    if len(raw) > _MOST_READ or begins(raw) not in (_QUOTE, _OBJECT):
        return
    try:
        value = _VALUE.decode(raw)
        if isinstance(value, str):
            value = _VALUE.decode(value)
    except (msgspec.DecodeError, RecursionError):
        raise RequestError(
            f"`{path}` is not a JSON schema.", param=path, code="invalid_json_schema"
        ) from None
    _walk(value, path, facts)


def _walk(schema: Any, path: str, facts: list[Fact]) -> None:
    depth = properties = enum = longest = patterns = 0
    multiple, spaces = 1, False
    level: list[Any] = [schema]
    while level:
        depth += 1
        below: list[Any] = []
        for node in level:
            if isinstance(node, list):
                below += [each for each in node if isinstance(each, dict | list)]
                continue
            if not isinstance(node, dict):
                continue
            properties += _length(node.get("properties"), dict)
            enum += _length(node.get("enum"), list)
            multiple = min(math.lcm(multiple, _multiple_of(node)), _MOST_MULTIPLE)
            spaces = spaces or _WHITESPACE in _guidance(node)
            for pattern in _patterns(node):
                longest = max(longest, len(pattern))
                patterns += len(pattern)
                check_pattern(pattern, f"{path}.pattern", patterns)
            below += [each for each in node.values() if isinstance(each, dict | list)]
        level = below
    facts += [
        Fact("schema_depth", float(depth), path),
        Fact("schema_properties", float(properties), path),
        Fact("schema_enum", float(enum), path),
        Fact("schema_multiple", float(multiple), path),
        Fact("pattern_chars", float(longest), path),
    ]
    if spaces:
        facts.append(Fact(_WHITESPACE_ROW, 1.0, f"{path}.{_GUIDANCE}.{_WHITESPACE}"))


def _length(value: object, kind: type) -> int:
    return len(value) if isinstance(value, kind) else 0  # type: ignore[arg-type]


def _multiple_of(node: dict[str, Any]) -> int:
    """Return the digits of `multipleOf`, as an engine has a state for each remainder; powers of ten need none."""
    value = node.get("multipleOf")
    if not isinstance(value, int | float) or isinstance(value, bool) or value == 0:
        return 1
    if abs(value) >= _MOST_MULTIPLE:
        return _MOST_MULTIPLE
    _, digits, exponent = Decimal(str(value)).normalize().as_tuple()
    assert isinstance(exponent, int)  # it is finite
    return 1 if digits == (1,) else int(Decimal((0, digits, max(0, exponent))))


def _patterns(node: dict[str, Any]) -> list[str]:
    found = [node["pattern"]] if isinstance(node.get("pattern"), str) else []
    if isinstance(more := node.get("patternProperties"), dict):
        found += more
    return found + [each for each in _guidance(node).values() if isinstance(each, str)]


def _guidance(node: dict[str, Any]) -> dict[str, Any]:
    """Return the patterns that stand between the values of a schema, where llguidance compiles it."""
    told = node.get(_GUIDANCE)
    return told if isinstance(told, dict) else {}


# The name, each letter of which may be an escape.
_STRICT: Final = re.compile(
    rb'"' + b"".join(rb"(?:%c|\\u00%x)" % (each, each) for each in b"strict") + rb'"'
)


def may_be_strict(tools: Raw) -> bool:
    """Whether any of these tools may ask for calls that keep to its schema."""
    data = bytes(tools)
    if data.find(b'"strict"') >= 0:
        return True
    if data.find(b"\\u006") < 0 and data.find(b"\\u007") < 0:  # no escape of a letter
        return False
    return _STRICT.search(data) is not None


def tool_facts(tool: Raw, path: str, facts: list[Fact], *, forced: bool) -> None:
    """Measure the schema of a tool, if the engine compiles it: it does where a tool is forced, or is strict.

    Source: vLLM 0.32 `tool_parsers/structural_tag_registry.py`, `resolve_tool_strictness`.

    Raises:
        RequestError: 400; a pattern or schema is not accepted, or a key comes twice.
    """
    if begins(tool) != _OBJECT:
        return
    fields = fields_once(tool, path)
    if forced or is_on(fields.get("strict", _NONE)):
        for name in ("parameters", "input_schema"):
            if name in fields:
                schema_facts(fields[name], f"{path}.{name}", facts)
    if "function" in fields:
        tool_facts(fields["function"], f"{path}.function", facts, forced=forced)
    for index, each in enumerate(items_if_list(fields.get("tools", _NONE))):
        tool_facts(each, f"{path}.tools[{index}]", facts, forced=forced)


class _Namespace(msgspec.Struct):
    """A tool, or a namespace of Responses: the engine makes a tool of each of its functions."""

    tools: Raw = Raw()


_NAMESPACES: Final = msgspec.json.Decoder(list[_Namespace])


def functions_in(tools: Raw, count: int) -> int:
    """Return how many tools there are, those in namespaces counted; `count` is the length of the list."""
    found: list[_Namespace] | None = decode_or_none(_NAMESPACES, tools)
    if found is None:
        return count
    return count + sum(len(items_if_list(each.tools)) for each in found if len(each.tools))


def check_pattern(pattern: str, path: str, chars: int) -> None:
    """Refuse a regular expression that is not cheap to compile.

    `chars` counts it and those before it in the same schema: reading them takes a microsecond each.

    Raises:
        RequestError: 400.
    """
    if chars > _MOST_PATTERN_CHARS:
        raise RequestError(
            f"The regular expressions in `{path}` have more than {_MOST_PATTERN_CHARS:,} characters"
            " together, the most that the gateway examines.",
            param=path,
            code="invalid_pattern",
        )
    if (problem := pattern_problem(pattern)) is not None:
        raise RequestError(
            f"The regular expression in `{path}` is not accepted: {problem}. "
            "Use RE2 syntax, without repetitions inside repetitions.",
            param=path,
            code="invalid_pattern",
        )


def structured_facts(raw: Raw, path: str, facts: list[Fact]) -> None:
    """Measure `structured_outputs`.

    Raises:
        RequestError: 400; a pattern or schema is not accepted, or a key comes twice.
    """
    fields = _object(raw, path)
    for name in ("json", "schema"):
        if name in fields:
            schema_facts(fields[name], f"{path}.{name}", facts)
    for name in ("grammar", "structural_tag"):
        if name in fields:
            grammar_facts(fields[name], f"{path}.{name}", facts)
    if "regex" in fields and begins(fields["regex"]) == _QUOTE:
        pattern = _TEXT.decode(fields["regex"])
        facts.append(Fact("pattern_chars", float(len(pattern)), f"{path}.regex"))
        check_pattern(pattern, f"{path}.regex", len(pattern))
    if "choice" in fields and begins(fields["choice"]) == _LIST:
        count = len(items_of(fields["choice"]))
        facts.append(Fact("choices", float(count), f"{path}.choice"))
        facts.append(Fact("schema_bytes", float(len(fields["choice"])), f"{path}.choice"))
    if begins(fields.get(_WHITESPACE, _NONE)) != _NULL:
        facts.append(Fact(_WHITESPACE_ROW, 1.0, f"{path}.{_WHITESPACE}"))


def format_facts(raw: Raw, path: str, facts: list[Fact]) -> None:
    """Measure a response format: OpenAI's, Responses' `text.format` or Anthropic's `output_config`.

    Raises:
        RequestError: 400; a pattern or schema is not accepted, or a key comes twice.
    """
    fields = _object(raw, path)
    for name in ("format", "json_schema"):
        if name in fields:
            format_facts(fields[name], f"{path}.{name}", facts)
    if "schema" in fields:
        schema_facts(fields["schema"], f"{path}.schema", facts)
    if (
        "structures" in fields
        or decode_or_none(_TEXT, fields.get("type", _NONE)) == "structural_tag"
    ):
        grammar_facts(raw, path, facts)


def grammar_facts(raw: Raw, path: str, facts: list[Fact]) -> None:
    """Measure a grammar or a structural tag, whose schemas count like any."""
    if begins(raw) == _NULL:
        return
    facts.append(Fact("grammar_bytes", float(len(raw)), path))
    if len(raw) > _MOST_READ:
        return
    value: Any = raw
    try:
        value = _VALUE.decode(raw)
        if isinstance(value, str) and value.lstrip()[:1] == "{":
            value = _VALUE.decode(value)
    except (msgspec.DecodeError, RecursionError):
        # Python's json reads more than JSON: NaN, half characters. 1e999 is JSON, and no number here.
        if path.endswith(".structural_tag") or not isinstance(value, str):
            raise RequestError(
                f"`{path}` is not valid JSON.", param=path, code="invalid_json_schema"
            ) from None
        return  # a grammar may begin so
    if isinstance(value, dict):
        _walk(value, path, facts)


def _object(raw: Raw, path: str) -> dict[str, Raw]:
    return fields_once(raw, path) if begins(raw) == _OBJECT else {}
