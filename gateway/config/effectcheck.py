"""Find valid settings that do not do what they seem to do. Pure, as `config.check`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from gateway.config.findings import KeyPath, Remark, warning
from gateway.config.models import Config
from gateway.config.units import format_duration
from gateway.core.limits import KeyLimits

_BUDGETS: Final = ("budget_per_day", "budget_per_month")


def check_effect(config: Config) -> Iterator[Remark]:
    """Yield a warning for each setting that does not do what it seems to do."""
    yield from _budgets(config)
    yield from _stop(config)
    yield from _collector(config)


def _budgets(config: Config) -> Iterator[Remark]:
    if config.prices.models:
        return
    stated: list[tuple[KeyPath, KeyLimits | None]] = []
    stated += [(("tiers", name), tier.limits) for name, tier in config.tiers.items()]
    stated += [(("tenants", name), tenant.limits) for name, tenant in config.tenants.items()]
    for owner, limits in stated:
        if rule := budget_in(limits):
            yield without_prices((*owner, "limits"), rule)


def budget_in(limits: KeyLimits | None) -> str | None:
    """Return the first budget of some limits; None: there is none."""
    each = () if limits is None else (limits, *(inner for _, inner in limits.models))
    found = (rule for rule in _BUDGETS if any(getattr(one, rule) is not None for one in each))
    return next(found, None)


def without_prices(path: KeyPath, budget: str) -> Remark:
    """Return the warning about a budget where no model has a price."""
    message = f"{budget} refuses nothing: no model has a price, so all of them are free"
    hint = "write `prices`, or limit tokens (tokens_per_day, tokens_per_month)"
    return warning(path, "no-prices", message, hint)


def _stop(config: Config) -> Iterator[Remark]:
    announce, grace = config.shutdown.announce, config.shutdown.grace
    if announce >= grace > 0:
        yield warning(
            ("shutdown", "announce"),
            "deadline-order",
            f"announce ({format_duration(announce)}) takes all of grace ({format_duration(grace)}), so"
            " requests that are running at its end are cut off",
            "leave most of grace to running requests",
        )


def _collector(config: Config) -> Iterator[Remark]:
    endpoint = config.traces.endpoint
    if endpoint is not None and endpoint.get_secret_value().rstrip("/").endswith("/v1/traces"):
        yield warning(
            ("traces", "endpoint"),
            "doubled-path",
            "spans are sent to /v1/traces of this URL, which has /v1/traces at its end already",
            "leave /v1/traces out",
        )
