"""A YAML file as plain values, with the place of each one and the environment filled in.

    ${NAME}            the variable; it is an error when it is not set
    ${NAME:-default}   the variable, or the default when it is unset or empty
    ${file:/path}      the content of a file (a mounted secret), without its last line end
    $${                a literal ${

References stand in values, not in keys. The reader below walks the parser's nodes, as only these know where
they start and end.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from ruamel.yaml import YAML, MappingNode, Node, ScalarNode, SequenceNode
from ruamel.yaml.error import YAMLError

from gateway.config.findings import Finding, KeyPath, Place, Remark, warning
from gateway.config.masking import Span, masked, masked_raw
from gateway.config.notyaml import LINE_END, not_yaml

MAX_NODES: Final = 100_000  # an alias bomb ends here
MAX_SECRET_BYTES: Final = 64 * 1024

_DASH: Final = re.compile(r"[\s-]*-\s*(?:#.*)?")  # a line that has only the dash of a list entry
_REFERENCE: Final = re.compile(r"\$\$\{|\$\{([^{}]*)\}")
_OF_A_SHELL: Final = re.compile(r"\$[A-Z_][A-Z0-9_]*")  # `$NAME`, as a shell reads it
_NAME: Final = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(?:(:-)(.*))?", re.DOTALL)
_TYPED: Final = frozenset(f"tag:yaml.org,2002:{name}" for name in ("int", "float", "bool", "null"))
_MERGE: Final = "tag:yaml.org,2002:merge"
_UNTYPED: Final = frozenset(
    f"tag:yaml.org,2002:{name}" for name in ("str", "timestamp", "value", "map", "seq")
)


@dataclass(slots=True)
class Document:
    """The values of a file, and where they are. `broken` values could not be filled in."""

    file: str
    lines: list[str]
    values: object = None
    places: dict[KeyPath, Place] = field(default_factory=dict)
    key_places: dict[KeyPath, Place] = field(default_factory=dict)
    references: dict[KeyPath, str] = field(default_factory=dict)  # texts that have some
    filled: dict[KeyPath, str] = field(default_factory=dict)  # these texts, filled in
    broken: set[KeyPath] = field(default_factory=set)
    findings: list[Finding] = field(default_factory=list)
    names: list[Span] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)

    def place(self, path: KeyPath, *, key: bool = False) -> Place:
        """Return where a value (or its key) is, or the nearest one around it."""
        for length in range(len(path), 0, -1):
            part = path[:length]
            exact = length == len(path) and not key
            found = self.places.get(part) if exact else self.key_places.get(part)
            found = found or self.places.get(part)
            if found is not None:
                return found
        return Place()

    def report(self, remark: Remark, place: Place | None = None) -> None:
        """Add a remark as a finding at a place, by default that of its setting."""
        self.findings.append(Finding.of(remark, self.file, place or self.place(remark.path)))

    def shown(self) -> list[str]:
        """Return its lines as they may be shown."""
        if self.values is None:
            return [masked_raw(line).rstrip() for line in self.lines]
        return [line.rstrip() for line in masked(self.lines, self.spans, self.names)]


def read_document(text: str, *, file: str, folder: Path, env: Mapping[str, str]) -> Document:
    """Parse YAML text; every problem becomes a finding of the document, none is raised.

    Args:
        text: the content of the file.
        file: its name in findings.
        folder: what relative `${file:...}` paths start from.
        env: the environment to fill in.
    """
    document = Document(file, LINE_END.split(text))
    try:
        # Safe and pure: no tag makes an object, and nodes carry marks.
        yaml = YAML(typ="safe", pure=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they quote the file
            root = yaml.compose(text)
    except (YAMLError, ValueError, RecursionError) as error:
        bad = not_yaml(error, text)
        document.report(Remark((), "bad-yaml", bad.message, bad.hint), bad.place)
        return document
    if not isinstance(root, MappingNode):
        what = "empty" if root is None else "not a mapping"
        hint = "the smallest valid file is `pools: {MODEL: {backends: [http://HOST:8000]}}`"
        document.report(Remark((), "bad-yaml", f"the file is {what}", hint))
        return document
    try:
        values = _Reader(document, yaml, folder, env).mapping(root, ())
    except (_TooManyError, RecursionError) as error:
        message = f"the file has more than {MAX_NODES} values (each use of an alias counts)"
        if isinstance(error, RecursionError):
            message = not_yaml(error, text).message
        document.report(Remark((), "bad-yaml", message))
        return document
    # Compose files made `x-` the place for anchors; it is no setting.
    document.values = {key: value for key, value in values.items() if not key.startswith("x-")}
    return document


def _joined(text: str) -> str:
    """Return text whose pairs of surrogates are characters; a lone one is U+FFFD.

    JSON escapes a character beyond 16 bits as two, and YAML takes each of them for a character.
    """
    if text.isprintable():  # no surrogate is
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


class _TooManyError(Exception):
    pass


class _Reader:
    def __init__(
        self, document: Document, yaml: YAML, folder: Path, env: Mapping[str, str]
    ) -> None:
        self._document = document
        self._yaml = yaml
        self._folder = folder
        self._env = env
        self._open: set[int] = set()  # nodes being read, to see an alias inside its own anchor
        self._count = 0

    def mapping(self, node: MappingNode, path: KeyPath) -> dict[str, object]:
        values: dict[str, object] = {}
        merged: list[Node] = []
        for key_node, value_node in node.value:
            if str(key_node.tag) == _MERGE:
                merged.append(value_node)
                continue
            place = _place(key_node)
            if not isinstance(key_node, ScalarNode):
                self._error("bad-yaml", "a key must be a plain name", path, place)
                continue
            key = _joined(str(key_node.value))
            if key in values:
                first = self._document.key_places[(*path, key)].line
                message = f"`{key}` appears twice; the first is in line {first}"
                self._error("duplicate-key", message, (*path, key), place)
                continue
            self._document.key_places[(*path, key)] = place
            self._document.names.append(_span(key_node, (*path, key)))
            values[key] = self._value(value_node, (*path, key))
            if _is_nothing(value_node):  # its own mark is where the next token begins
                self._document.places[(*path, key)] = place
        for key, value_node, place in self._merged(merged):
            if key not in values:
                self._document.key_places[(*path, key)] = place
                values[key] = self._value(value_node, (*path, key))
        return values

    def _merged(self, nodes: list[Node]) -> Iterator[tuple[str, Node, Place]]:
        """Yield what `<<:` brings in; earlier mappings win."""
        for node in nodes:
            for source in node.value if isinstance(node, SequenceNode) else [node]:
                if not isinstance(source, MappingNode) or id(source) in self._open:
                    self._error("bad-yaml", "`<<` needs a mapping", (), _place(source))
                    continue
                self._count_one()
                self._open.add(id(source))
                own = [pair for pair in source.value if str(pair[0].tag) != _MERGE]
                for key_node, value_node in own:
                    self._count_one()
                    yield _joined(str(key_node.value)), value_node, _place(key_node)
                yield from self._merged([v for k, v in source.value if str(k.tag) == _MERGE])
                self._open.discard(id(source))

    def _count_one(self) -> None:
        """Count a value or a merged mapping: nested merges grow as fast as nested aliases."""
        self._count += 1
        if self._count > MAX_NODES:
            raise _TooManyError

    def _value(self, node: Node, path: KeyPath) -> object:
        self._document.places[path] = _place(node)
        self._count_one()
        if id(node) in self._open:
            self._error("bad-yaml", "this alias is inside its own anchor", path)
            return None
        if str(node.tag) not in _TYPED | _UNTYPED:
            self._error(
                "bad-yaml",
                "a value with a tag (`!`) is not supported; put it in quotes if it begins with one",
                path,
            )
            return None
        if isinstance(node, ScalarNode):
            self._document.spans.append(_span(node, path))
            return self._scalar(node, path)
        self._open.add(id(node))
        try:
            if isinstance(node, MappingNode):
                return self.mapping(node, path)
            return [self._entry(item, (*path, place)) for place, item in enumerate(node.value)]
        finally:
            self._open.discard(id(node))

    def _entry(self, node: Node, path: KeyPath) -> object:
        """Return an entry of a list; one that is empty is placed at its dash."""
        value = self._value(node, path)
        if _is_nothing(node):
            number = node.start_mark.line
            while number and not _DASH.fullmatch(self._document.lines[number]):
                number -= 1
            dash = self._document.lines[number].find("-")
            self._document.places[path] = Place(number + 1, dash + 1)
        return value

    def _scalar(self, node: ScalarNode, path: KeyPath) -> object:
        if str(node.tag) in _TYPED:
            try:
                value: object = self._yaml.constructor.construct_object(node)
            except (ValueError, LookupError, YAMLError):
                return str(node.value)  # `!!int x`: validation will ask for a number
            return value
        text = _joined(str(node.value))
        if _OF_A_SHELL.fullmatch(text):
            message, hint = "this is taken as it is written", "write ${NAME} if a variable is meant"
            self._document.report(warning(path, "no-variable", message, hint))
        return text if "${" not in text else self._filled(text, path, _place(node))

    def _filled(self, text: str, path: KeyPath, place: Place) -> str:
        failed = False

        def fill(match: re.Match[str]) -> str:
            nonlocal failed
            if match[1] is None:
                return "${"
            value = self._resolve(match[1], path)
            if isinstance(value, str):
                return value
            failed = True
            self._document.report(value, self._reference_place(place, match[0]))
            return ""

        self._document.references[path] = text
        rest = _REFERENCE.sub("", text)
        if "${" in rest:
            failed = True
            self._error("bad-reference", "`${` has no closing brace", path)
        self._document.filled[path] = filled = _REFERENCE.sub(fill, text)
        if failed:
            self._document.broken.add(path)
        return filled

    def _resolve(self, reference: str, path: KeyPath) -> str | Remark:
        """Return the text that a reference stands for, by what is between its braces; or what is wrong with it."""
        if reference.startswith("file:"):
            return self._secret_file(reference.removeprefix("file:").strip(), path)
        match = _NAME.fullmatch(reference)
        if match is None:
            hint = "write ${NAME}, ${NAME:-default} or ${file:/path}"
            problem = "what is between the braces does not name a variable"
            return Remark(path, "bad-reference", problem, hint)
        name, has_default, default = match[1], match[2], match[3]
        value = self._env.get(name)
        if has_default:
            return value or default
        if value is None:
            hint = f"set it, or write ${{{name}:-}} if it is optional"
            problem = f"${{{name}}} is not set and has no default"
            return Remark(path, "unset-variable", problem, hint)
        return value

    def _secret_file(self, name: str, path: KeyPath) -> str | Remark:
        secret = self._folder / name
        try:
            with secret.open("rb") as file:
                content = file.read(MAX_SECRET_BYTES + 1)
            if len(content) > MAX_SECRET_BYTES:
                problem = f"is larger than {MAX_SECRET_BYTES} bytes"
            else:
                return content.decode().removesuffix("\n").removesuffix("\r")
        except UnicodeDecodeError:
            problem = "is not UTF-8 text"
        except (OSError, ValueError) as error:
            problem = f"cannot be read: {getattr(error, 'strerror', None) or error}"
        return Remark(path, "unreadable-file", f"{secret} {problem}")

    def _reference_place(self, place: Place, reference: str) -> Place:
        line = self._document.lines[place.line - 1]
        column = line.find(reference, place.column - 1)
        return place if column < 0 else Place(place.line, column + 1, len(reference))

    def _error(self, code: str, message: str, path: KeyPath, place: Place | None = None) -> None:
        self._document.report(Remark(path, code, message), place)


def _span(node: Node, path: KeyPath) -> Span:
    start, end = node.start_mark, node.end_mark
    return Span(path, start.line, start.column, end.line, end.column)


def _is_nothing(node: Node) -> bool:
    """Whether nothing is written where a value should be."""
    return isinstance(node, ScalarNode) and node.start_mark.index == node.end_mark.index


def _place(node: Node) -> Place:
    start, end = node.start_mark, node.end_mark
    one_line = isinstance(node, ScalarNode) and start.line == end.line
    width = max(1, end.column - start.column) if one_line else 1
    return Place(start.line + 1, start.column + 1, width)
