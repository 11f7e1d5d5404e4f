"""What is wrong with settings that lead from one pool to another."""

from __future__ import annotations

import pytest

from tests.unit.test_config_check import codes, findings, warnings


def pools(first, second="", more=""):
    return (
        f"pools: {{a: {{backends: [http://h:1], {first}}}, b: {{backends: [http://h:2], {second}}}}}\n"
        + more
    )


@pytest.mark.parametrize(
    ("fallback", "code"),
    [
        ("{no_backend: b}", None),
        ("{overload: [b], context: b}", None),
        ("{overload: a}", "fallback-loop"),
        ("{overload: [b, c]}", "unknown-pool"),
        ("{overload: gpt}", "unknown-pool"),
        ("{no_backend: b, adapters: [sql]}", None),
    ],
)
def test_a_fallback_names_other_pools(fallback, code):
    found = codes(pools(f"fallback: {fallback}", "aliases: [gpt]"))
    assert found == ([] if code is None else [code])


def test_the_finding_says_where_and_what_to_write():
    (found,) = findings(pools("fallback: {context: c}"))
    assert found.path == ("pools", "a", "fallback", "context")
    assert "there is no pool `c`" in found.message
    assert found.hint.endswith("there are: b")


def test_two_pools_may_stand_in_for_each_other():
    assert findings(pools("fallback: {overload: b}", "fallback: {overload: a}")) == ()


def test_an_adapter_that_falls_back_is_one_of_the_pool():
    both = "adapters: [sql], fallback: {{overload: b, adapters: [{}]}}"
    assert codes(pools(both.format("sql"))) == []
    assert codes(pools(both.format("sqll"))) == ["unknown-adapter"]


def test_tenants_that_are_kept_apart_do_not_fall_back_to_a_shared_cache():
    apart = "prefix_cache: per_tenant"
    fallback = f"{apart}, fallback: {{overload: b}}"
    assert codes(pools(fallback)) == ["shared-fallback"]
    assert codes(pools(fallback, apart)) == []


def test_a_window_that_is_no_larger_never_helps():
    assert warnings(pools("max_context: 8k, fallback: {context: b}", "max_context: 8k")) == [
        "smaller-window"
    ]
    assert warnings(pools("max_context: 8k, fallback: {context: b}", "max_context: 9k")) == []


def test_weights_and_labels_that_change_nothing_are_doubtful():
    weighted = "pools: {{m: {{backends: [{{url: 'http://h:1', weight: {}}}, {{url: 'http://h:2', weight: 0}}]}}}}"
    assert warnings(weighted.format(1)) == []
    assert warnings(weighted.format(0)) == ["no-weight"]
    labelled = (
        "pools: {{m: {{backends: [{{url: 'http://h:1', labels: {{zone: a}}}}],"
        " prefer: {{labels: {{zone: {}}}}}}}}}"
    )
    assert warnings(labelled.format("a")) == []
    assert warnings(labelled.format("b")) == ["nobody-near"]


def test_a_weight_is_not_negative():
    assert codes("pools: {m: {backends: [{url: 'http://h:1', weight: -1}]}}") == ["out-of-range"]


def on_trial(canary, *revisions):
    backends = ", ".join(
        f"{{url: 'http://h:{n}', revision: {r}}}" for n, r in enumerate(revisions, 1)
    )
    return f"pools: {{m: {{canary: {{{canary}}}, backends: [{backends}]}}}}"


def test_a_revision_on_trial_has_backends_and_others_beside_it():
    assert findings(on_trial("revision: v2, weight: 0.1", "v1", "v2")) == ()
    assert codes(on_trial("revision: v3, weight: 0.1", "v1", "v2")) == ["unknown-revision"]
    assert warnings(on_trial("revision: v1, weight: 0.1", "v1", "v1")) == ["no-other-revision"]
    assert warnings(on_trial("revision: v2, weight: 0.8", "v1", "v1", "v2")) == ["heavy-canary"]


@pytest.mark.parametrize("how", ["header: true", "keys: [gw_0123456789ab]", "weight: 0.1"])
def test_a_revision_on_trial_is_no_reserve(how):
    backends = "{url: 'http://h:1'}, {url: 'http://h:2', revision: v2, weight: 0}"
    canary = f"pools: {{m: {{canary: {{revision: v2, {how}}}, backends: [{backends}]}}}}"
    assert warnings(canary) == ["canary-in-reserve"]
    assert warnings(canary.replace("weight: 0}", "weight: 1}")) == []


@pytest.mark.parametrize("how", ["", ", weight: 0.1, header: true", ", weight: 0"])
def test_one_thing_says_which_requests_go_to_it(how):
    assert len(codes(on_trial(f"revision: v2{how}", "v1", "v2"))) == 1


@pytest.mark.parametrize(
    "asked",
    [
        "prefix_cache: per_tenant",
        "prefix: precise, tokenizer: /models/m",
        "adapters: [{name: sql, path: /lora/sql}]",
    ],
)
def test_what_only_vllm_does_is_not_asked_of_another_engine(asked):
    pool = "pools: {{m: {{engine: {}, {}, backends: ['http://h:1']}}}}"
    assert codes(pool.format("openai", asked)) == ["not-vllm"]
    assert "not-vllm" not in codes(pool.format("vllm", asked))


def test_only_vllm_is_started_from_here():
    launch = "launch: {command: [vllm, serve, /models/m], port: 8001}"
    pool = f"pools: {{m: {{backends: [{{engine: openai, {launch}}}]}}}}"
    assert "not-vllm" in codes(pool)


@pytest.mark.parametrize(
    ("to", "code"), [("b", []), ("a", ["shadow-loop"]), ("c", ["unknown-pool"])]
)
def test_copies_go_to_another_pool(to, code):
    assert codes(pools(f"shadow: {{to: {to}, share: 0.1}}")) == code


def test_tenants_that_are_kept_apart_are_kept_apart_in_copies_too():
    apart = "prefix_cache: per_tenant"
    assert codes(pools(f"{apart}, shadow: {{to: b}}")) == ["shared-shadow"]
    assert codes(pools(f"{apart}, shadow: {{to: b}}", apart)) == []
