"""Every setting as Markdown: `python -m gateway.config.reference > deploy/CONFIGURATION.md`."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from gateway.config.models import Config
from gateway.config.reload import NEEDS_RESTART

_HEAD: Final = """\
# Settings

Made from the settings that the gateway reads: `python -m gateway.config.reference > deploy/CONFIGURATION.md`.

- `vllm-gateway check FILE` reports every mistake, with line and column. `vllm-gateway config show --origin` prints
  what is in force, and which line of the file says so. [`gateway.schema.json`](../configs/gateway.schema.json) is for
  editors.
- Durations have a unit (`500ms`, `30s`, `2m`, `1h30m`, `30d`), and so have sizes (`64MiB`, `8MB`). Token counts may end
  with `k` or `m`, in powers of two: `32k` is 32,768.
- Any value may have `${VARIABLE}`, `${VARIABLE:-default}`, or `${file:/path}` for what a file holds (a mounted secret);
  `$${` is a literal `${`. Names at the top that begin with `x-` are ignored: a place for YAML anchors.
- Paths are relative to the folder of the file. `SIGHUP`, or `vllm-gateway reload`, puts a changed file in force;
  no stream is cut.
- What these say holds from the next start or `vllm-gateway upgrade` on, and `reload` names what waits for it:
"""
_NAME: Final = "NAME"

Schema = Mapping[str, Any]


def reference() -> str:
    """Return the page: one table for each section, in the order of the file."""
    schema = Config.model_json_schema()
    pages = _Pages(schema["$defs"])
    once = textwrap.wrap(", ".join(f"`{name}`" for name in NEEDS_RESTART) + ".", 115)
    lines = [_HEAD + "\n".join(f"  {line}" for line in once) + "\n", *pages.section("", schema)]
    while pages.ahead:  # sections of sections come after the table that names them
        lines += pages.section(*pages.ahead.pop(0))
    return "\n".join(lines).rstrip() + "\n"


@dataclass(slots=True)
class _Pages:
    """Writes sections, and remembers those that a section mentions."""

    known: Mapping[str, Schema]  # the sections by name
    ahead: list[tuple[str, Schema]] = field(default_factory=list)  # path and section
    # The name of a section, and the path that describes it.
    seen: dict[str, str] = field(default_factory=dict)

    def section(self, path: str, schema: Schema) -> Iterator[str]:
        yield f"## {path or 'At the top of the file'}"
        yield ""
        if path and (about := " ".join(schema.get("description", "").split())):
            yield about
            yield ""
        yield "| setting | value | default | meaning |"
        yield "|---|---|---|---|"
        inner = self.ahead
        self.ahead = []
        for name, each in schema["properties"].items():
            own = f"{path}.{name}" if path else name
            value = self._value(own, each)
            meaning = _in_cell(each.get("description") or self._summary(each))
            yield f"| `{name}` | {value} | {_default(each, name, schema)} | {meaning} |"
        self.ahead += inner  # depth first, as the file is read
        yield ""

    def _value(self, path: str, schema: Schema) -> str:
        """Return what may be written, in words."""
        if "$ref" in schema:
            return self._referred(path, schema["$ref"].rpartition("/")[2])
        if "anyOf" in schema:
            kinds = dict.fromkeys(self._value(path, each) for each in schema["anyOf"])
            return " or ".join(
                sorted(filter(None, kinds), key=lambda each: each.startswith("list"))
            )
        if "const" in schema:
            return _code(schema["const"])
        if "enum" in schema:
            return " ".join(_code(each) for each in schema["enum"])
        match schema.get("type"):
            case "null":
                return ""
            case "array":
                items = schema.get("items")
                return f"list of {self._value(f'{path}[]', items)}" if items else "list"
            case "object":
                return self._mapping(path, schema)
            case _:
                return _plain(schema)

    def _mapping(self, path: str, schema: Schema) -> str:
        if own := schema.get("properties"):
            return "mapping with " + " ".join(_code(name) for name in own)
        inner = schema.get("additionalProperties")
        if isinstance(patterns := schema.get("patternProperties"), dict):
            (inner,) = patterns.values()
        kind = self._value(f"{path}.{_NAME}", inner) if isinstance(inner, dict) else "values"
        return f"names, each with {kind}"

    def _referred(self, path: str, name: str) -> str:
        section = self.known[name]
        if "properties" not in section:  # an enumeration
            return self._value(path, section)
        if name not in self.seen:
            self.seen[name] = path
            self.ahead.append((path, section))
        return f"[section](#{_anchor(self.seen[name])})"

    def _summary(self, schema: Schema) -> str:
        if "$ref" not in schema:
            return ""
        about: str = self.known[schema["$ref"].rpartition("/")[2]].get("description", "")
        return about.partition("\n\n")[0]


def _plain(schema: Schema) -> str:
    if examples := schema.get("examples"):
        return "such as " + ", ".join(_code(each) for each in examples)
    kind = schema.get("type")
    if kind in ("integer", "number"):
        least = schema.get("minimum", schema.get("exclusiveMinimum"))
        most = schema.get("maximum", schema.get("exclusiveMaximum"))
        whole = "whole number" if kind == "integer" else "number"
        if most is not None:
            return f"{whole}, {least if least is not None else 'at most'} to {most}"
        above = "more than" if "exclusiveMinimum" in schema else "at least"
        return whole if least is None else f"{whole}, {above} {least}"
    return {"boolean": "true or false", "string": "text"}.get(str(kind), "any value")


def _default(schema: Schema, name: str, section: Schema) -> str:
    if name in section.get("required", ()):
        return "**required**"
    default = schema.get("default")
    return "" if default in (None, "", {}, []) else _code(default)


def _code(value: object) -> str:
    written = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return f"`{_in_cell(written)}`"


def _in_cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _anchor(path: str) -> str:
    """Return what GitHub makes of a heading: lower case, without what is no letter, digit or `_`."""
    return "".join(each for each in path.lower() if each.isalnum() or each in "_-")


if __name__ == "__main__":
    sys.stdout.write(reference())
