"""How limits, tenants and prices are written."""

from pathlib import Path

import pytest

from gateway.config.keylimits import limits_told, read_limits
from gateway.config.load import check_text
from gateway.core.asked import Caller
from gateway.core.limits import KeyLimits, OnOutage, Rule, limits_over
from gateway.limiting.plans import compiled
from gateway.limiting.prices import Prices

WRITTEN = {
    "requests_per_minute": 60,
    "output_tokens_per_minute": {"limit": "20k", "on_outage": "open"},
    "tokens_per_day": "2M",
    "budget_per_month": 49.5,
    "models": {"qwen3-*": {"concurrent_requests": 4, "shadow": True}},
    "on_outage": "closed",
}


def test_limits_are_read_and_told_alike():
    limits = read_limits(WRITTEN)
    assert limits == KeyLimits(
        requests_per_minute=60,
        output_tokens_per_minute=20 * 1024,
        tokens_per_day=2 * 1024 * 1024,
        budget_per_month=49.5,
        on_outage=OnOutage.CLOSED,
        apart=((Rule.OUTPUT, OnOutage.OPEN, None),),
        models=(("qwen3-*", KeyLimits(concurrent_requests=4, shadow=True)),),
    )
    assert read_limits(limits_told(limits)) == limits


def test_a_rule_of_its_own_differs_from_its_mapping():
    plan = compiled(Caller("k", "ci", "t", limits=read_limits(WRITTEN)), None, "qwen3-8b")
    told = {
        each.limit.rule: (each.limit.on_outage.value, each.limit.shadow, each.limit.models)
        for each in plan.rules
    }
    assert told == {
        Rule.REQUESTS: ("closed", False, ""),
        Rule.OUTPUT: ("open", False, ""),
        Rule.TOKENS_DAY: ("closed", False, ""),
        Rule.BUDGET_MONTH: ("closed", False, ""),
        Rule.CONCURRENT: ("open", True, "qwen3-*"),
    }


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ({}, "expected a mapping"),
        ({"rpm": 1}, "unknown limit 'rpm'"),
        ({"requests_per_minute": 0}, "requests_per_minute: must be at least 1"),
        ({"budget_per_day": "much"}, "budget_per_day: must be an amount of money above 0"),
        ({"budget_per_day": 0}, "above 0"),
        ({"requests_per_minute": {"most": 3}}, "requests_per_minute: unknown setting 'most'"),
        ({"requests_per_minute": {"shadow": True}}, "requests_per_minute"),
        ({"requests_per_minute": 1, "on_outage": "shut"}, "local, open or closed"),
        ({"requests_per_minute": 1, "shadow": "perhaps"}, "true or false"),
        ({"models": {"a": {"models": {}}}}, "unknown limit 'models'"),
        ({"models": ["a"]}, "mapping of globs"),
    ],
)
def test_what_is_no_limit_is_told(value, why):
    with pytest.raises(ValueError, match=why):
        read_limits(value)


FILE = """
keys: none
pools: {m: {backends: ["http://127.0.0.1:1"]}}
tenants:
  acme: {limits: {requests_per_minute: 5, budget_per_day: 2}}
prices:
  currency: EUR
  models:
    big-2: {input: 4, output: 8}
    "big-*": {input: 1, cached_input: 0.1, output: 2}
"""


def test_tenants_and_prices_are_read_from_the_settings():
    config = check_text(FILE, folder=Path()).partial.config
    assert config.tenants["acme"].limits == KeyLimits(5, budget_per_day=2.0)
    prices = Prices(config.prices)
    assert prices.of("big-1", "p").of(1_000_000, 500_000, 200_000) == pytest.approx(
        0.8 + 0.02 + 1.0
    )
    assert prices.of("x", "big-2").of(1_000_000, 0, 500_000) == 4.0
    assert prices.of("x", "y") is None


@pytest.mark.parametrize("price", [".inf", ".nan", "-1"])
@pytest.mark.parametrize("what", ["input", "cached_input", "output"])
def test_a_price_is_a_number_that_can_be_added_up(price, what):
    text = FILE.replace("big-2: {input: 4, output: 8}", f"big-2: {{{what}: {price}}}")
    (finding,) = check_text(text, folder=Path()).findings
    assert finding.path == ("prices", "models", "big-2", what)


def test_a_keys_limits_go_before_its_tiers_rule_by_rule():
    tier = read_limits(
        {
            "requests_per_minute": {"limit": 60, "shadow": True},
            "tokens_per_day": {"limit": 500, "on_outage": "open"},
            "concurrent_requests": 8,
            "models": {"a": {"requests_per_minute": 5, "tokens_per_day": 9}},
        }
    )
    own = read_limits({"requests_per_minute": 90, "models": {"a": {"requests_per_minute": 6}}})
    assert limits_told(limits_over(own, tier)) == {
        "requests_per_minute": 90,
        "tokens_per_day": {"limit": 500, "on_outage": "open"},
        "concurrent_requests": 8,
        "models": {"a": {"requests_per_minute": 6, "tokens_per_day": 9}},
    }
    assert limits_over(None, tier) is tier
    closed = limits_over(read_limits({"on_outage": "closed"}), tier)
    assert {each[1] for each in closed.apart} == {OnOutage.CLOSED}


def rules_of(limits):
    """Return the limits of a key for the model `big-1`, by glob and rule."""
    plan = compiled(Caller("k", "ci", "t", limits=limits), None, "big-1")
    return {(each.limit.models, each.limit.rule): each.limit for each in plan.rules}


def test_what_a_mapping_says_of_its_rules_holds_for_those_of_its_models_too():
    models = {"big-*": {"requests_per_minute": 1}, "*": {"requests_per_minute": 2, "shadow": False}}
    found = rules_of(read_limits({"shadow": True, "on_outage": "closed", "models": models}))
    assert found["big-*", Rule.REQUESTS].shadow
    assert not found["*", Rule.REQUESTS].shadow  # it says so itself
    assert found["*", Rule.REQUESTS].on_outage is OnOutage.CLOSED


def test_a_key_in_shadow_is_refused_nothing_by_limits_of_models_of_its_tier():
    models = {"big-*": {"requests_per_minute": 1, "shadow": False}}
    tier = read_limits({"requests_per_minute": 5, "models": models})
    found = rules_of(limits_over(read_limits({"shadow": True}), tier))
    assert found["", Rule.REQUESTS].shadow
    assert found["big-*", Rule.REQUESTS].shadow
    own = read_limits({"shadow": True, "models": {"big-*": {"shadow": False}}})
    assert not rules_of(limits_over(own, tier))["big-*", Rule.REQUESTS].shadow


def test_what_a_key_says_goes_before_its_tier_also_where_it_says_the_usual():
    tier = read_limits(
        {"requests_per_minute": 5, "models": {"big-*": {"requests_per_minute": 1}}, "shadow": True}
    )
    for limit in rules_of(limits_over(read_limits({"shadow": False}), tier)).values():
        assert not limit.shadow
    closed = read_limits({"requests_per_minute": 5, "on_outage": "closed"})
    (limit,) = rules_of(limits_over(read_limits({"on_outage": "local"}), closed)).values()
    assert limit.on_outage is OnOutage.LOCAL


@pytest.mark.parametrize(
    "limits",
    [
        {"shadow": False},
        {"on_outage": "local"},
        {"models": {}},
        {"models": {"big-*": {"shadow": False}}},
    ],
)
def test_limits_that_limit_nothing_are_told_as_they_are_written(limits):
    assert limits_told(read_limits(limits)) == limits
