"""Load settings from a file: read it, fill in the environment, validate, and report everything that is wrong.

A wrong value does not hide the others: it is removed and the rest is validated again, so that one run
reports everything.
"""

from __future__ import annotations

import copy
import hashlib
import os
from codecs import BOM_UTF8
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from gateway.config.check import check_meaning
from gateway.config.document import Document, read_document
from gateway.config.effectcheck import check_effect
from gateway.config.explain import explain
from gateway.config.findings import Finding, KeyPath, Place, Remark, Severity, dotted
from gateway.config.models import Config
from gateway.config.placement import check_placement
from gateway.config.prefixcheck import check_prefix
from gateway.config.trafficcheck import check_traffic
from gateway.config.units import SHOWN_CHARS, format_size
from gateway.core.errors import ConfigError

_STAND_IN: Final = {"pools-are-wrong": {"backends": ["http://pools-are-wrong"]}}
_SECRET_CHARS: Final = 4  # shorter texts are no secrets, and occur within other words
_HINTS: Final[Mapping[type[OSError], str]] = {
    FileNotFoundError: (
        "give its path with -c, or have one written: `vllm-gateway init --from http://HOST:8000`"
    ),
    PermissionError: (
        "the user who runs this must be allowed to read it (`chown USER FILE`) and to enter its folders"
    ),
}
_MOST_BYTES: Final = 16 * 1024**2  # more is a log or a model, whose reading would fill the memory
_ROUNDS: Final = 20  # of removing wrong values; each removes at least one


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a setting was written. `reference` is its text when it names the environment."""

    place: Place
    reference: str = ""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A usable configuration, where its settings come from, and what is doubtful about it."""

    config: Config
    origin: Mapping[KeyPath, Origin] = field(default_factory=dict)  # what is not here is a default
    warnings: tuple[Finding, ...] = ()
    lines: Sequence[str] = ()  # of the file, as they may be shown
    text_hash: str = ""  # of the file

    def told_in(self, path: KeyPath) -> str:
        """Say where a setting comes from: `line 7`, `line 8, ${ADMIN_TOKEN}`, or `default`."""
        found = self.origin.get(path)
        if found is None and path[-1] in ("url", "name"):
            found = self.origin.get(path[:-1])  # in the short form, `- http://...`
        if found is None:
            return "default"
        reference = f", {found.reference}" if found.reference else ""
        return f"line {found.place.line}{reference}"

    def referring(self) -> set[KeyPath]:
        """Return the settings whose text has a reference, and the sections that they are in."""
        places = [place for place, each in self.origin.items() if each.reference]
        return {place[:end] for place in places for end in range(1, len(place) + 1)}


@dataclass(frozen=True, slots=True)
class Checked:
    """The outcome of a check, with the findings in the order of the file.

    `partial` is what remains without the wrong values, for a verb that needs one section only.
    """

    findings: tuple[Finding, ...]
    loaded: Loaded | None = None
    partial: Loaded | None = None

    def wrong(self) -> set[KeyPath]:
        """Return the settings that have an error; `partial` has the default of each."""
        return {each.path for each in self.findings if each.severity is Severity.ERROR}


def load_config(path: Path, env: Mapping[str, str] = os.environ) -> Loaded:
    """Return the configuration of a file.

    Raises:
        ConfigError: with every finding, one line each.
    """
    checked = check_file(path, env)
    if checked.loaded is None:
        raise ConfigError([str(finding) for finding in checked.findings])
    return checked.loaded


def check_file(path: Path, env: Mapping[str, str] = os.environ) -> Checked:
    """Check a file; every problem is a finding, a file that cannot be read too."""
    try:
        with path.open("rb") as opened:
            raw = opened.read(_MOST_BYTES + 1)
    except OSError as error:
        message = f"cannot read the file: {error.strerror or error}"
        return _unusable(path, "unreadable-file", message, _HINTS.get(type(error), ""))
    if len(raw) > _MOST_BYTES:
        message = f"the file is larger than {format_size(_MOST_BYTES)}, so it is no settings file"
        return _unusable(path, "unreadable-file", message)
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        return _unusable(path, "bad-yaml", f"the file is not UTF-8 (byte {error.start})")
    return check_text(text, file=str(path), folder=path.absolute().parent, env=env)


def _unusable(path: Path, code: str, message: str, hint: str = "") -> Checked:
    return Checked((Finding((), code, message, hint, file=str(path)),))


def check_text(
    text: str, *, file: str = "<text>", folder: Path, env: Mapping[str, str] | None = None
) -> Checked:
    """Check the text of a file; needs no network, and no file but those of `${file:...}`.

    Args:
        text: YAML.
        file: its name in findings.
        folder: what relative paths start from.
        env: the environment to fill in.
    """
    document = read_document(text, file=file, folder=folder, env=env or {})
    config = None
    if document.values is not None:
        config, wrong = _validate(document, folder)
        if config is not None:
            _report_remarks(document, config, wrong)
    lines = document.shown()
    findings = tuple(
        replace(each, source=_line(lines, each.place))
        for each in sorted(document.findings, key=lambda f: (f.place.line, f.place.column, f.code))
    )
    if config is None:
        return Checked(findings)
    loaded = Loaded(config, _origin(document), findings, lines, text_hash(text.encode()))
    wrong_somewhere = any(each.severity is Severity.ERROR for each in findings)
    return Checked(findings, None if wrong_somewhere else loaded, partial=loaded)


def text_hash(raw: bytes) -> str:
    """Return a hash of the text of a file."""
    return hashlib.sha256(raw.removeprefix(BOM_UTF8)).hexdigest()


def placed(remark: Remark, loaded: Loaded, file: Path) -> Finding:
    """Return a remark as a finding at its place in the file."""
    origin = loaded.origin.get(remark.path)
    place = origin.place if origin is not None else Place()
    source = _line(loaded.lines, place) if origin is not None else ""
    return Finding.of(remark, str(file), place, source)


def _line(lines: Sequence[str], place: Place) -> str:
    return lines[place.line - 1] if 0 < place.line <= len(lines) else ""


def _validate(document: Document, folder: Path) -> tuple[Config | None, set[KeyPath]]:
    """Return the configuration without its wrong values, and the paths of those."""
    values: Any = copy.deepcopy(document.values)
    wrong: set[KeyPath] = set(document.broken)
    for _ in range(_ROUNDS):
        try:
            return Config.model_validate(values, context={"folder": folder}), wrong
        except ValidationError as error:
            problems = _causes([explain(e) for e in error.errors(include_url=False)])
        for problem in problems:
            # What only follows from a value that is wrong is not reported.
            if not any(_touches(_about(problem), known) for known in wrong):
                _report(document, problem)
        removed: list[KeyPath] = []
        for problem in problems:
            if problem.code != "unknown-key":
                wrong.add(problem.path)
            if any(problem.path[: len(path)] == path for path in removed):
                continue
            if problem.path == ("pools",) and "pools" not in values:
                values["pools"] = _STAND_IN  # so that the rest can be looked at
            elif (path := _take_out(values, problem.path)) is None:
                return None, wrong
            else:
                removed.append(path)
    return None, wrong


def _causes(problems: list[Remark]) -> list[Remark]:
    """Leave out that a list is too short where its entries are what is wrong."""
    inner = {problem.path[:length] for problem in problems for length in range(len(problem.path))}
    return [p for p in problems if not (p.code == "out-of-range" and p.path in inner)]


def _about(problem: Remark) -> KeyPath:
    """Return the setting that a problem is about: a missing `url` may only mean that the `launch` is wrong."""
    return problem.path[:-1] if problem.path[-1:] == ("url",) else problem.path


def _touches(path: KeyPath, known: KeyPath) -> bool:
    """Whether one is the other, or a part of it."""
    shorter = min(len(path), len(known))
    return path[:shorter] == known[:shorter]


def _take_out(values: Any, path: KeyPath) -> KeyPath | None:
    """Remove the value at `path`, or the innermost mapping entry around it; return the path of what was removed.

    None: nothing could be removed.
    """
    holder, key, here, removed = None, "", values, 0
    for length, part in enumerate(path, 1):
        if isinstance(here, dict) and part in here:
            holder, key, here, removed = here, str(part), here[part], length
        elif isinstance(here, list) and isinstance(part, int) and part < len(here):
            here = here[part]
        else:
            break
    if holder is None:
        return None
    del holder[key]
    return path[:removed]


def _report_remarks(document: Document, config: Config, wrong: set[KeyPath]) -> None:
    checks = (check_meaning, check_traffic, check_prefix, check_placement, check_effect)
    for remark in (remark for check in checks for remark in check(config)):
        # A section that lost a wrong value must not be judged by the default in its place.
        section = remark.path[:-1] or remark.path
        if not any(path[: len(section)] == section for path in wrong):
            _report(document, remark)


def _report(document: Document, remark: Remark) -> None:
    at_key = remark.code in ("unknown-key", "bad-name") and remark.path in document.key_places
    shown = replace(remark, message=_without_filled(document, remark))
    document.report(shown, document.place(remark.path, key=at_key))


def _without_filled(document: Document, remark: Remark) -> str:
    """Return the message with references in place of what they stand for: that may be a secret."""
    message, setting = remark.message, dotted(remark.path)
    name = setting if message.startswith(setting) else ""
    message = message.removeprefix(name)
    for path, filled in document.filled.items():
        if not _touches(path, remark.path):
            continue
        for shown in (filled.strip(), filled.strip()[:SHOWN_CHARS]):
            if len(shown) >= _SECRET_CHARS:
                message = message.replace(shown, document.references[path])
    return name + message


def _origin(document: Document) -> dict[KeyPath, Origin]:
    references = document.references
    return {path: Origin(at, references.get(path, "")) for path, at in document.places.items()}
