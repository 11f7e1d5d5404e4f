"""Why keys cannot be read or changed as asked. Messages are for operators, and repeat no secret."""

from __future__ import annotations

from collections.abc import Sequence


class KeyStoreError(Exception):
    """What was asked of the store is not possible; the message is for people."""


class NoSuchKey(KeyStoreError):
    """No record has this id."""


class BadSettings(KeyStoreError):
    """Settings are wrong: `wrong` are pairs of a setting's name and what to say of it."""

    def __init__(self, findings: Sequence[tuple[str, str]]) -> None:
        super().__init__("; ".join(why for _, why in findings))
        self.wrong = tuple(findings)


class VersionConflict(KeyStoreError):
    """The record is no longer the one of `if_match`; `version` is what it is now."""

    def __init__(self, version: str) -> None:
        super().__init__(
            f"The key was changed meanwhile: its version is now {version}. Read it again, then change it."
        )
        self.version = version


class WrongState(KeyStoreError):
    """The key has ended, or has two secrets already."""


class NotUnderstood(KeyStoreError):
    """The record has something that this version does not know, or is damaged."""

    def __init__(self, key_id: str) -> None:
        super().__init__(
            f"This version cannot read the key {key_id}. A newer one changed it, and then ask a gateway of that"
            " version; or it is damaged."
        )


class WrongPepper(KeyStoreError):
    """The pepper of this machine is not the one that the shared keys were made with."""

    def __init__(self) -> None:
        super().__init__(
            "The pepper of this machine is not the one that the shared keys were made with, so none of"
            " them could be checked here. Copy the pepper (`keys.file` with `.pepper`, or"
            " `keys.pepper`) from a gateway that works."
        )
