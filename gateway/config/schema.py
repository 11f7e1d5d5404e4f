"""The JSON Schema of the settings file, for editors: units as patterns, help, defaults."""

from __future__ import annotations

from typing import Any, Final

from gateway.config.models import Config

# Any value may be a reference to the environment, which the schema must not call an error.
_REFERENCE: Final = r"^.*\$\{.+\}.*$"


def json_schema() -> dict[str, Any]:
    """Return the schema of the YAML file (draft 2020-12)."""
    schema = Config.model_json_schema()
    schema["patternProperties"] = {"^x-": {"description": "Ignored: a place for anchors."}}
    head = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "vllm-gateway configuration",
    }
    widened: dict[str, Any] = _widen({**schema, **head})
    return widened


def _widen(node: Any) -> Any:
    if isinstance(node, list):
        return [_widen(item) for item in node]
    if not isinstance(node, dict):
        return node
    # Titles are the field names again; editors show the key anyhow.
    made = {
        key: {name: _widen(item) for name, item in value.items()}
        if key in ("properties", "$defs", "patternProperties")
        else _widen(value)
        for key, value in node.items()
        if not (key == "title" and "properties" not in node)
    }
    kind = made.get("type")
    if kind in ("integer", "number", "boolean"):
        return {**made, "type": [kind, "string"], "pattern": _REFERENCE}
    if kind == "string" and "enum" in made:
        allowed = {"enum": made.pop("enum")}
        return {**made, "anyOf": [allowed, {"pattern": _REFERENCE}]}
    if kind == "string" and "pattern" in made:
        return {**made, "pattern": f"{made['pattern']}|{_REFERENCE}"}
    if made.get("additionalProperties") is False and "description" in made:
        made["description"] = " ".join(str(made["description"]).split())
    return made
