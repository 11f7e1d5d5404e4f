"""What the tokens of each model cost."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Final

from gateway.config.keylimits import PricesConfig
from gateway.core.limits import Price

_MOST_CACHED: Final = 4096


class Prices:
    """The prices in force."""

    def __init__(self, config: PricesConfig) -> None:
        self.currency = config.currency or ""
        self._globs = {glob: each.price() for glob, each in config.models.items()}
        self._found: dict[tuple[str, str], Price | None] = {}

    def of(self, model: str, pool: str) -> Price | None:
        """Return the price of a model, by its own name before that of its pool; None: it is free."""
        if not self._globs:
            return None
        if (model, pool) not in self._found:
            if len(self._found) >= _MOST_CACHED:
                self._found.clear()
            self._found[model, pool] = self._by_name(model) or self._by_name(pool)
        return self._found[model, pool]

    def _by_name(self, name: str) -> Price | None:
        if name in self._globs:
            return self._globs[name]
        matching = (price for glob, price in self._globs.items() if fnmatchcase(name, glob))
        return next(matching, None)
