"""What holds for a key: its own values over those of its tier over the defaults, each said to be of whom."""

from hypothesis import given
from hypothesis import strategies as st

from gateway.access.effective import Origin, caller_of, effective
from gateway.access.records import KeyRecord, Secret, as_node, read_record
from gateway.config.keysettings import KeySettings

names = st.lists(st.sampled_from(["*", "a*", "b", "lora-1"]), max_size=3)
rows = st.sampled_from(["priority", "n", "content.uuid", "tools"])
limits = st.dictionaries(
    st.sampled_from(["requests_per_minute", "concurrent_requests", "output_tokens_per_minute"]),
    st.integers(1, 99),
    min_size=1,
)
parameters = st.fixed_dictionaries(
    {},
    optional={
        "allow": st.lists(st.sampled_from(["priority", "n", "content.uuid"]), max_size=2),
        "deny": st.lists(st.sampled_from(["tools", "logprobs"]), max_size=2),
        "max": st.dictionaries(st.just("n"), st.integers(0, 9)),
        "media": st.sampled_from(["data", "any"]),
    },
)
settings = st.fixed_dictionaries(
    {},
    optional={
        "models": names,
        "deny": names,
        "addresses": st.lists(st.sampled_from(["10.0.0.0/8", "::1/128"]), max_size=2),
        "max_context": st.integers(1, 9999),
        "max_output": st.integers(1, 9999),
        "priority": st.integers(-5, 5),
        "fallback": st.booleans(),
        "limits": limits,
        "parameters": parameters,
    },
).map(KeySettings.model_validate)
SIMPLE = ("models", "deny", "addresses", "max_context", "max_output", "priority", "fallback")
DEFAULTS = {"models": ("*",), "deny": (), "addresses": (), "priority": 0, "fallback": True}


def record_of(own):
    return KeyRecord(id="abcdefgh", name="a", tenant="a", secrets=(Secret(b"d" * 32),), own=own)


@given(settings, st.none() | settings)
def test_a_value_is_the_keys_else_the_tiers_else_the_default(own, tier):
    record, wide = record_of(own), tier or KeySettings()
    values = effective(record, tier)
    for name in SIMPLE:
        expected, origin = DEFAULTS.get(name), Origin.DEFAULT
        for settings, of in ((wide, Origin.TIER), (own, Origin.KEY)):
            if getattr(settings, name) is not None:
                expected, origin = getattr(settings, name), of
        told = values[name].value
        assert (tuple(told) if isinstance(told, list) else told) == expected
        assert values[name].origin is origin
    for rule in ("requests_per_minute", "concurrent_requests", "output_tokens_per_minute"):
        narrow, broad = (
            None if each.limits is None else getattr(each.limits, rule) for each in (own, wide)
        )
        told = values.get(f"limits.{rule}")
        assert (None if told is None else told.value) == (broad if narrow is None else narrow)
        if told is not None:
            assert told.origin is (Origin.TIER if narrow is None else Origin.KEY)


@given(settings, st.none() | settings)
def test_who_asks_is_bound_by_the_values_that_are_told(own, tier):
    record = record_of(own)
    values, caller = effective(record, tier), caller_of(record, tier)
    assert list(caller.models) == values["models"].value
    assert list(caller.denied) == values["deny"].value
    assert list(caller.addresses or ()) == values["addresses"].value
    assert caller.priority == values["priority"].value
    assert caller.falls_back == values["fallback"].value
    assert caller.max_context_tokens == values["max_context"].value
    assert caller.max_output_tokens == values["max_output"].value
    if own.parameters is not None and caller.parameters is not None:
        assert {*own.parameters.allow} <= caller.parameters.allow
        assert not caller.parameters.deny & {*own.parameters.allow}


@given(settings)
def test_a_record_is_read_as_it_was_written(own):
    record = record_of(own)
    again = read_record(as_node(record))
    assert as_node(again) == as_node(record)
    assert again.version == record.version
    assert caller_of(again, None) == caller_of(record, None)
