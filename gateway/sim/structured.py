"""What a reply must look like: the JSON Schema or the choice that a request demands, and a reply that fits.

Patterns, grammars and keywords that are not named here are not followed; an engine follows them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Final

from gateway.sim.errors import SimError

Form = Callable[[str], str]  # some words in, a reply in the form that was demanded

_DEPTH_MAX: Final = 8  # from there on only what is required; a schema may contain itself
_UNENDING: Final = 32
_OBJECT: Final = {"type": "object", "properties": {"value": {"type": "string"}}}  # for "some JSON"
# One example of each format that clients parse. Source: JSON Schema 2020-12, section 7.3.
_FORMATS: Final = {
    "date": "2026-01-31",
    "date-time": "2026-01-31T12:00:00Z",
    "time": "12:00:00Z",
    "duration": "PT1H",
    "email": "someone@example.com",
    "hostname": "example.com",
    "ipv4": "192.0.2.1",
    "ipv6": "2001:db8::1",
    "uri": "https://example.com/",
    "uuid": "00000000-0000-4000-8000-000000000000",
}


def demanded(body: dict[str, Any]) -> Form | None:
    """Return what makes the reply out of some words, where the request demands a form; None: plain text."""
    options = body.get("structured_outputs")
    if isinstance(options, dict):
        if isinstance(choice := options.get("choice"), list) and choice:
            return lambda words: str(choice[0])
        if options.get("json") or options.get("json_object"):
            return _json(options.get("json") or _OBJECT)
    return next((_json(schema) for each in _formats(body) if (schema := _schema(each))), None)


def _formats(body: dict[str, Any]) -> list[Any]:
    """Return where OpenAI's chats, its Responses and Anthropic's Messages name a format."""
    inner = [body.get(name) for name in ("text", "output_config")]
    return [
        body.get("response_format"),
        *(each.get("format") for each in inner if isinstance(each, dict)),
    ]


def _schema(form: Any) -> Any:
    if not isinstance(form, dict):
        return None
    if form.get("type") == "json_object":
        return _OBJECT
    if form.get("type") == "json_schema":
        within = form.get("json_schema")
        return (within if isinstance(within, dict) else form).get("schema")
    return None


def _json(schema: Any) -> Form:
    return lambda words: example(schema, words)


def arguments(tools: Any, name: str, words: str) -> str:
    """Return JSON that a function may be called with, by the parameters that its tool declares."""
    functions = [tool.get("function") or tool for tool in tools or ()]
    declared = (
        each.get("parameters") or each.get("input_schema")
        for each in functions
        if each.get("name") == name
    )
    schema = next(declared, None)
    told = isinstance(schema, dict) and "properties" in schema
    return example(schema if told else _OBJECT, words)


def example(schema: Any, words: str) -> str:
    """Return JSON that fits a schema. Its free strings are `words`.

    Raises SimError (400) if the schema cannot be read.
    """
    try:
        read = json.loads(schema) if isinstance(schema, str) else schema
        return json.dumps(_Example(read, words).of(read, 0))
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        raise SimError(400, "Failed to compile the grammar of a JSON Schema.") from error


class _Example:
    def __init__(self, root: Any, words: str) -> None:
        self.root = root
        self.words = words

    def of(self, schema: Any, depth: int) -> Any:
        if not isinstance(schema, dict) or depth > _UNENDING:
            return self.words
        if "const" in schema:
            return schema["const"]
        if schema.get("enum"):
            return schema["enum"][0]
        if isinstance(schema.get("$ref"), str):
            return self.of(self._found(schema["$ref"]), depth + 1)
        for several in ("anyOf", "oneOf"):
            if schema.get(several):
                rest = {name: value for name, value in schema.items() if name != several}
                return self.of(_merged([rest, _one_of(schema[several], depth)]), depth + 1)
        if schema.get("allOf"):
            parts = [self._found(each.get("$ref", "")) or each for each in schema["allOf"]]
            return self.of(_merged([*parts, schema]), depth + 1)
        return self._of_type(_type(schema), schema, depth)

    def _of_type(self, kind: Any, schema: dict[str, Any], depth: int) -> Any:
        match kind:
            case "object":
                return self._object(schema, depth)
            case "array":
                wanted = schema.get("minItems", 0 if depth > _DEPTH_MAX else 1)
                first = schema.get("prefixItems", [])
                given = [*first, *[schema.get("items")] * (wanted - len(first))]
                return [self.of(each, depth + 1) for each in given[: schema.get("maxItems")]]
            case "integer" | "number":
                return _number(schema, kind)
            case "boolean":
                return True
            case "null":
                return None
        return _string(schema, self.words)

    def _object(self, schema: dict[str, Any], depth: int) -> dict[str, Any]:
        """Give all properties, and only what is required far down in a schema that contains itself."""
        properties = schema.get("properties") or {}
        required = schema.get("required") or []
        names = [*properties, *(name for name in required if name not in properties)]
        if depth > _DEPTH_MAX:
            names = [name for name in names if name in required]
        return {name: self.of(properties.get(name), depth + 1) for name in names}

    def _found(self, pointer: str) -> Any:
        """Return the part of the schema that `#/...` names; None: it has none."""
        if not pointer.startswith("#"):
            return None
        found = self.root
        for part in pointer.split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            found = found.get(key) if isinstance(found, dict) else None
        return found


def _one_of(schemas: list[Any], depth: int) -> dict[str, Any]:
    """Return the first; far down in a schema that contains itself, the first that refers to no other."""
    found = [each for each in schemas if isinstance(each, dict)] or [{}]
    ending = [each for each in found if "$ref" not in each] if depth > _DEPTH_MAX else []
    return (ending or found)[0]


def _type(schema: dict[str, Any]) -> Any:
    kind = schema.get("type")
    if isinstance(kind, list):
        return next((each for each in kind if each != "null"), "null")
    if kind is None:
        return "object" if "properties" in schema else "array" if "items" in schema else None
    return kind


def _merged(schemas: list[dict[str, Any]]) -> dict[str, Any]:
    """Return one schema for several that all hold: their properties together, else the last word."""
    merged: dict[str, Any] = {}
    for schema in schemas:
        properties = {**merged.get("properties", {}), **schema.get("properties", {})}
        required = [*merged.get("required", []), *schema.get("required", [])]
        merged |= schema | ({"properties": properties, "required": required} if properties else {})
    merged.pop("allOf", None)
    return merged


def _number(schema: dict[str, Any], kind: str) -> int | float:
    """Return the number of least size between the bounds."""
    step = schema.get("multipleOf") or (1 if kind == "integer" else 0.5)
    low = schema.get("minimum", schema.get("exclusiveMinimum"))
    high = schema.get("maximum", schema.get("exclusiveMaximum"))
    value: int | float = 0
    if low is not None and low >= 0:
        value = -(-low // step) * step
        value += step if value == schema.get("exclusiveMinimum") else 0
    elif high is not None and high <= 0:
        value = high // step * step
        value -= step if value == schema.get("exclusiveMaximum") else 0
    return int(value) if kind == "integer" else value


def _string(schema: dict[str, Any], words: str) -> str:
    given = _FORMATS.get(str(schema.get("format")), words)
    return given.ljust(schema.get("minLength", 0), ".")[: schema.get("maxLength")]
