"""What somebody may do on the admin listener: four roles, each of which includes those before it."""

from __future__ import annotations

from enum import Enum
from typing import Final

ON_THIS_MACHINE: Final = "local"  # who asks where no token is needed


class Role(Enum):
    """A role, from the one that may do least to the one that may do all."""

    METRICS = "metrics"  # reads /metrics, and nothing else
    VIEWER = "viewer"  # reads everything; no answer has a secret
    OPERATOR = "operator"  # also orders: backends, restarts, adapters, reload
    ADMIN = "admin"  # also keys, and which process serves

    def includes(self, other: Role) -> bool:
        """Whether this role may do what the other one may."""
        return _ORDER.index(self) >= _ORDER.index(other)


_ORDER = tuple(Role)
