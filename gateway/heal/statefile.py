"""Small JSON files of the state folder: read with a warning when damaged, written whole or not at all."""

from __future__ import annotations

import hashlib
import logging
import os
from pathlib import Path
from typing import TypeVar

import msgspec

log = logging.getLogger("gateway.supervisor")

T = TypeVar("T")


def read_state(path: Path, decoder: msgspec.json.Decoder[T]) -> T | None:
    """Return what a file holds; None when there is none, or (with a warning) when it cannot be read.

    One that is damaged is kept aside, as `<name>.damaged`, so that what it said can be looked up.
    """
    try:
        return decoder.decode(path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        why, kept = error.strerror or str(error), ""
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        why, kept = str(error), f" What it held is in {_kept_aside(path)}."
    log.warning(
        "cannot read %s, so it counts as empty: %s.%s", *(path, why, kept),
        extra={"event": "state_damaged"},
    )  # fmt: skip
    return None


def _kept_aside(path: Path) -> Path:
    aside = path.with_name(f"{path.name}.damaged")
    try:
        path.replace(aside)
    except OSError:
        return path
    return aside


def write_state(path: Path, value: object, what: str) -> bool:
    """Replace a file by another, for this user alone; its folder is made.

    Returns False, with a warning that `what` is not saved, where it cannot be written; what was there
    before stays, and the next gateway reads it.
    """
    draft = path.with_suffix(".new")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        draft.write_bytes(msgspec.json.format(msgspec.json.encode(value)))
        draft.chmod(0o600)
        os.replace(draft, path)
    except OSError as error:
        log.warning(
            "cannot save %s: %s: %s", what, error.filename or path, error.strerror,
            extra={"event": "state_unsaved"},
        )  # fmt: skip
        return False
    return True


def digest(value: object) -> str:
    """Return what tells two values apart, by how they are written, without telling them."""
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]
