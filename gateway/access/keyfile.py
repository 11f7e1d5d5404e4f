"""The keys file on disk: read whole, changed under a lock, and the pepper beside it.

    keys.yaml          who may come in: ids, limits and digests, never a key
    keys.yaml.pepper   32 random bytes, without which the digests prove nothing
    keys.yaml.lock     held while somebody changes the file

A change is read, made and written under the lock, into a new file that then takes the old one's
name: a reader sees the file before or after, and two writers lose nothing of each other's. Comments
stay.
"""

from __future__ import annotations

import base64
import binascii
import fcntl
import os
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from difflib import get_close_matches
from io import BytesIO
from pathlib import Path
from typing import Any, Final

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.constructor import RoundTripConstructor
from ruamel.yaml.error import YAMLError

from gateway.access.keyerrors import BadSettings
from gateway.access.records import KeyRecord, read_record
from gateway.config.notyaml import not_yaml
from gateway.config.process import KeysConfig
from gateway.core.errors import ConfigError

PEPPER_BYTES: Final = 32
_OTHERS: Final = 0o007
_TOP: Final = ("version", "keys")
_HEAD: Final = "Keys of vllm-gateway: hashes only. Change it with `vllm-gateway keys`."


def pepper_path(path: Path) -> Path:
    """Return where the pepper of a keys file is."""
    return path.with_name(path.name + ".pepper")


def read_records(path: Path) -> list[KeyRecord]:
    """Read every record of the file.

    Raises:
        ConfigError: the file is missing or wrong; every finding with its line and column.
    """
    return _parsed(path, _load(path))


def read_pepper(path: Path) -> bytes:
    """Read the pepper of a keys file.

    Raises:
        ConfigError: it is missing, open to everybody, or not a pepper.
    """
    pepper = pepper_path(path)
    try:
        with pepper.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            text = file.read(1024)
    except OSError as error:
        raise ConfigError(
            [f"{pepper}: error: {error.strerror}; without it no key of {path.name} can be checked"]
        ) from error
    if mode & _OTHERS:
        raise ConfigError(
            [f"{pepper}: error: every user of this machine can read it; run: chmod 600 {pepper}"]
        )
    return pepper_of(text, str(pepper))


def shared_pepper(keys: KeysConfig) -> bytes:
    """Return the pepper of keys that gateways share.

    Raises:
        ConfigError: it is missing, open to everybody, or not a pepper.
    """
    if keys.pepper is not None:
        return pepper_of(keys.pepper.get_secret_value().encode(), "keys.pepper")
    return read_pepper(keys.file)


def pepper_of(text: bytes, where: str) -> bytes:
    """Return the pepper that a text holds.

    Raises:
        ConfigError: it holds none.
    """
    with suppress(binascii.Error):
        value = base64.b64decode(text.strip(), validate=True)
        if len(value) == PEPPER_BYTES:
            return value
    raise ConfigError([f"{where}: error: it does not hold {PEPPER_BYTES} bytes in base64"])


def stamp_of(path: Path) -> list[object]:
    """Return what changes whenever the file or its pepper does, also who may read them."""
    stamp: list[object] = []
    for file in (path, pepper_path(path)):
        with suppress(OSError):
            found = os.stat(file)
            stamp.append((file, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns))
    return stamp


@contextmanager
def edit(path: Path) -> Iterator[tuple[CommentedSeq, list[KeyRecord]]]:
    """Change the file under its lock: yield the list of records to change and what it holds now.

    The file and its pepper are made when missing. Nothing is written when the body raises.

    Raises:
        ConfigError: the file is wrong, or may not be written; or somebody without the lock wrote it meanwhile.
    """
    try:
        with locked(path):
            make_pepper(path)
            stamp = stamp_of(path)
            document = _load(path) if path.exists() else None
            if not document:
                document = CommentedMap(version=1)
                document.yaml_set_start_comment(_comments(path) or _HEAD)
            records = _parsed(path, document)
            if not isinstance(document.get("keys"), CommentedSeq):
                document["keys"] = CommentedSeq()
            yield document["keys"], records
            out = BytesIO()
            _yaml().dump(document, out)
            # Never write what could not be read again.
            _parsed(path, _yaml().load(out.getvalue()))
            if stamp_of(path) != stamp:  # an editor takes no lock
                raise ConfigError(
                    [
                        f"{path}: error: somebody else wrote it at this moment; nothing was changed, try again"
                    ]
                )
            put_in_place(path.resolve(), out.getvalue())
    except OSError as error:
        raise ConfigError([f"{error.filename or path}: error: {error.strerror}"]) from error


def _comments(path: Path) -> str:
    """Return what a file without keys has; empty where there is none."""
    lines = path.read_text().splitlines() if path.exists() else []
    return "\n".join(each[1:].removeprefix(" ") for each in lines if each.startswith("#"))


def _parsed(path: Path, document: object) -> list[KeyRecord]:
    """Check the whole document; all findings at once."""
    if document is None:
        return []
    if not isinstance(document, CommentedMap):
        raise ConfigError([f"{path}:1:1: error: expected a mapping with version and keys"])
    where = _Where(path)
    for key in document:
        if key not in _TOP:
            close = get_close_matches(str(key), _TOP, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            where.report(document, key, f"unknown setting {str(key)[:64]!r}{hint}")
    if document.get("version", 1) != 1:
        where.report(document, "version", "this gateway reads version 1")
    nodes = document.get("keys") or []
    if not isinstance(nodes, list):
        where.report(document, "keys", "expected a list of keys")
        nodes = []
    records = _entries(where, nodes)
    if where.findings:
        raise ConfigError(where.findings)
    return records


def _entries(where: _Where, nodes: Any) -> list[KeyRecord]:
    """Return the records of a list, without those that are wrong."""
    records: dict[str, KeyRecord] = {}
    for index, node in enumerate(nodes):
        if not isinstance(node, CommentedMap):
            where.report(nodes, index, "expected a mapping with id, name and digest")
            continue
        try:
            record = read_record(node)
        except BadSettings as error:
            for name, message in error.wrong:
                where.report(node, name, message)
            continue
        if record.id in records:
            where.report(node, "id", f"the id {record.id} appears twice")
        records[record.id] = record
    return list(records.values())


@dataclass(frozen=True, slots=True)
class _Where:
    """Collects findings with their place in the file."""

    path: Path
    findings: list[str] = field(default_factory=list)

    def report(self, node: Any, key: object, message: str) -> None:
        """Add a finding at a mapping's key or a list's index; else at the node itself."""
        line, column = node.lc.line, node.lc.col
        with suppress(KeyError, AttributeError, TypeError):
            place = node.lc.key if isinstance(node, CommentedMap) else node.lc.item
            line, column = place(key)
        self.findings.append(f"{self.path}:{line + 1}:{column + 1}: error: {message}")


class _Constructor(RoundTripConstructor):
    """Leaves a time that cannot be, such as 2026-11-31, as it is written: who reads the key names its place."""

    def construct_yaml_timestamp(self, node: Any, values: Any = None) -> Any:
        try:
            return super().construct_yaml_timestamp(node, values)
        except ValueError:
            return str(node.value)


_Constructor.add_constructor("tag:yaml.org,2002:timestamp", _Constructor.construct_yaml_timestamp)


def _yaml() -> YAML:
    yaml = YAML()
    yaml.Constructor = _Constructor
    yaml.width = 10_000  # never fold what somebody wrote on one line
    yaml.indent(mapping=2, sequence=4, offset=2)
    return yaml


def _load(path: Path) -> Any:
    """Return the document with its positions; None for an empty file."""
    raw = b""
    try:
        raw = path.read_bytes()
        return _yaml().load(raw)
    except FileNotFoundError as error:
        raise ConfigError(
            [f"{path}: error: file not found; `vllm-gateway keys create NAME -c FILE` creates it"]
        ) from error
    except OSError as error:
        raise ConfigError([f"{path}: error: {error.strerror}"]) from error
    except (YAMLError, RecursionError) as error:
        told = not_yaml(error, raw.decode(errors="replace"))
        where = f"{path}:{told.place.line}:{told.place.column}"
        hint = f"; {told.hint}" if told.hint else ""
        raise ConfigError([f"{where}: error: {told.message}{hint}"]) from error
    except (ValueError, LookupError, AttributeError) as error:
        # A value is not as its tag says.
        raise ConfigError([f"{path}: error: not YAML: {error}"]) from error


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the file's lock. The lock file stays: removing it would let two holders in."""
    lock = os.open(
        path.with_name(path.name + ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600
    )
    try:
        _give_to_owner_of_folder(lock, path)
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _give_to_owner_of_folder(file: int, path: Path) -> None:
    """Give an open file that root may have made to the owner of its folder; others cannot give theirs away."""
    if os.geteuid() == 0:
        folder = path.parent.stat()
        os.fchown(file, folder.st_uid, folder.st_gid)


def make_pepper(path: Path) -> None:
    """Make the pepper on first use; refuse to make one for keys that were hashed with another."""
    pepper = pepper_path(path)
    if pepper.exists() or (path.exists() and read_records(path)):
        read_pepper(path)
        return
    put_in_place(pepper, base64.b64encode(secrets.token_bytes(PEPPER_BYTES)) + b"\n")


def put_in_place(path: Path, content: bytes) -> None:
    """Put a new file in the place of `path`, durably; owner and mode stay.

    A new file is 0600; if root makes it, it belongs to the owner of its folder, who is the one that serves.
    """
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            _give_to_owner_of_folder(file.fileno(), path)
            with suppress(FileNotFoundError):
                before = path.stat()
                os.fchmod(file.fileno(), before.st_mode & 0o777)
                with suppress(PermissionError):
                    os.fchown(file.fileno(), before.st_uid, before.st_gid)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
