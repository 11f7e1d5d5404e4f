"""Names that were given to backends, kept for the gateway that comes next: <state>/names.json.

What an operator ordered and what runs is in the state folder under these names, so an address must not
change its own when the gateway is started anew with another file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec

from gateway.config.identity import Names
from gateway.heal.statefile import read_state, write_state

_DECODER: Final = msgspec.json.Decoder(dict[str, dict[str, str]])
_FILE: Final = "names.json"


def read_names(state: Path) -> Names:
    """Return the names as the gateway before kept them; none if there was none."""
    return read_state(state / _FILE, _DECODER) or {}


def save_names(state: Path, names: Names) -> None:
    """Keep the names, if they are not what is kept; where that fails it is logged."""
    if names != read_names(state):
        write_state(state / _FILE, names, "the names of backends")
