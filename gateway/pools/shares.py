"""How much of what is in flight at one backend is each tenant's. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

# Where nothing is withheld, the others' p99 first token beside a flood is 1.9 to 2.9 times as long,
# and all together get 12 to 20 % more good replies. Three simulated engines, seed 1.
_SHARES: Final = 1.5  # even shares that a tenant may hold; equal tenants mostly differ by less


@dataclass(slots=True)
class Shares:
    """Tokens in flight, whole needs."""

    tokens: int = 0
    by_tenant: dict[str, int] = field(default_factory=dict)

    def take(self, tenant: str, tokens: int) -> None:
        """Count tokens for a tenant."""
        self.tokens += tokens
        self.by_tenant[tenant] = self.by_tenant.get(tenant, 0) + tokens

    def give_back(self, tenant: str, tokens: int) -> None:
        """Count them no more; who has none left is forgotten."""
        self.tokens -= tokens
        left = self.by_tenant.pop(tenant, 0) - tokens
        if left > 0:
            self.by_tenant[tenant] = left

    def holds_much(self, tenant: str) -> bool:
        """Whether a tenant has clearly more than an even share; one that is alone there has no share."""
        count = len(self.by_tenant)
        return count > 1 and self.by_tenant.get(tenant, 0) * count > _SHARES * self.tokens
