"""Which backend takes a request, why others do not, and which names lead where."""

import dataclasses
import math
import random
from collections import Counter

import pytest

from gateway.config.models import Config
from gateway.core.errors import EndpointNotServed, MissingModel, ModelNotFound
from gateway.core.prefix import Prefix, SentPrompt, Session
from gateway.core.types import (
    Ask,
    Call,
    Caller,
    Demand,
    Dialect,
    Endpoint,
    Exclusion,
    LoadSample,
    ModelsSeen,
    Need,
    Phase,
    ProbeFailed,
    ProbePassed,
    Route,
    Scraped,
    ServedModel,
)
from gateway.pools.configured import Withheld
from gateway.pools.health import Order
from gateway.pools.pulse import Waits
from gateway.pools.table import PoolTable
from gateway.prefix.approximate import ApproximateIndex
from gateway.routing.catalog import Catalog, Catalogs, status
from gateway.routing.choice import NOBODY, Chooser, obstacle

NOW = 100.0
URLS = [f"http://127.0.0.1:{port}" for port in (8001, 8002, 8003)]
BASE = ServedModel("m", None, 4096)
LORA = ServedModel("lora-a", "m", None)
ROUTE = Route("m", "m", "m")
LORA_ROUTE = Route("lora-a", "m", "lora-a", adapter="lora-a")
SMALL = Demand(prompt_tokens=10, exact=True)
ANYONE = Caller("k1", "anyone", "t")


class ManualClock:
    def __init__(self):
        self.at = NOW

    def now(self):
        return self.at

    def wall(self):
        return self.at


def pools(**named):
    """Return pools from their settings; a list stands for the backends alone."""
    settings = {
        name: {"backends": value} if isinstance(value, list) else value
        for name, value in named.items()
    }
    for each in settings.values():
        each.setdefault("kv", {"stop_admitting": 0.9, "resume": 0.8})  # round numbers
    return Config.model_validate({"pools": settings}).pools


def table_of(config):
    table = PoolTable(ManualClock())
    table.apply(config)
    return table


def make_ready(table, backend_id, models=(BASE,), endpoints=None):
    table.observe(backend_id, ModelsSeen(NOW, tuple(models), endpoints))
    table.observe(backend_id, ProbePassed(NOW))
    backend = table.get(backend_id)
    assert backend.phase is Phase.READY
    return backend


def make_degraded(table, backend_id):
    """Have its health checks time out while it serves."""
    for _ in range(2):
        table.observe(backend_id, ProbeFailed(NOW, "timeout"))
    table.listen([(table.get(backend_id), Waits(NOW, math.inf, math.inf, ()))], NOW)
    table.observe(backend_id, ProbeFailed(NOW, "timeout"))
    assert table.get(backend_id).phase is Phase.DEGRADED


def make_down(table, backend_id):
    for _ in range(3):
        table.observe(backend_id, ProbeFailed(NOW, "refused"))
    assert table.get(backend_id).phase is Phase.DOWN


def scrape(table, backend_id, *, running=0, waiting=0, kv=0.1, capacity=None):
    table.observe(backend_id, Scraped(LoadSample(NOW, running, waiting, kv, capacity)))


def call(model="m", endpoint=Endpoint.CHAT):
    return Call(endpoint, Dialect.CHAT, model, stream=False, body=b"{}")


def ask(*, route=ROUTE, asked=None, demand=SMALL, caller=ANYONE, tried=(), **more):
    return Ask(route, asked or call(), demand, caller, tried=dict.fromkeys(tried, math.inf), **more)


def told(table, *, now=NOW, **asked):
    return Chooser(table).explain(ask(**asked), now)


def found(table, **asked):
    """Return the names of those that may take the request."""
    return sorted(backend_id.removeprefix("m/") for backend_id in told(table, **asked).expected_s)


def why(table, **asked):
    return told(table, **asked).excluded


def chosen(table, *, seed=0, now=NOW, barred=NOBODY, **asked):
    best = Chooser(table, random.Random(seed)).find(ask(**asked), now, barred)
    return best.name if best is not None else None


@pytest.fixture
def table():
    """Three backends, all ready, none scraped."""
    table = table_of(pools(m=URLS))
    for backend in tuple(table):
        make_ready(table, backend.id)
    return table


# --- who may take a request -----------------------------------------------------------------------


def test_every_ready_backend_is_eligible(table):
    assert found(table) == ["b1", "b2", "b3"]
    assert why(table) == {}


def test_a_degraded_backend_waits_while_a_ready_one_can(table):
    make_degraded(table, "m/b1")
    assert found(table) == ["b2", "b3"]


def test_degraded_backends_serve_when_no_ready_one_does(table):
    make_degraded(table, "m/b1")
    make_degraded(table, "m/b3")
    make_down(table, "m/b2")
    assert found(table) == ["b1", "b3"]


def test_a_degraded_backend_serves_when_the_ready_ones_cannot_take_this_request(table):
    make_degraded(table, "m/b1")
    scrape(table, "m/b2", running=1, kv=0.95)
    assert found(table, tried=["m/b3"]) == ["b1"]


def test_a_backend_that_was_tried_is_not_asked_again(table):
    assert found(table, tried=["m/b1", "m/b2"]) == ["b3"]
    assert why(table, tried=["m/b1"]) == {"m/b1": Exclusion.ALREADY_TRIED}


def test_a_backend_that_came_back_after_it_was_tried_may_be_asked_again(table):
    make_down(table, "m/b1")
    again = ask()
    again.tried["m/b1"] = NOW + 1
    table.observe("m/b1", ModelsSeen(NOW + 2, (BASE,)))
    for _ in range(3):
        table.observe("m/b1", ProbePassed(NOW + 2))
    assert table.get("m/b1").phase is Phase.READY  # anew
    chooser = Chooser(table)
    assert set(chooser.explain(again, NOW + 2).expected_s) == {"m/b1", "m/b2", "m/b3"}
    again.tried["m/b1"] = NOW + 3
    assert chooser.explain(again, NOW + 3).excluded == {"m/b1": Exclusion.ALREADY_TRIED}


def test_what_suits_is_looked_for_again_when_a_model_list_or_a_phase_changes(table):
    chooser, wanted = Chooser(table), ask(route=LORA_ROUTE)
    assert chooser.find(wanted, NOW) is None
    make_ready(table, "m/b2", models=(BASE, LORA))
    assert chooser.find(wanted, NOW).name == "b2"
    make_down(table, "m/b2")
    assert chooser.find(wanted, NOW) is None
    assert chooser.explain(wanted, NOW).excluded["m/b2"] is Exclusion.NOT_SERVING


def test_backends_that_take_no_work_are_not_serving(table):
    table.apply(pools(m=[*URLS, "http://127.0.0.1:8004"]))
    table.order("m/b1", Order.CORDON)
    table.order("m/b2", Order.DRAIN)
    make_down(table, "m/b3")
    phases = {backend.phase for backend in table}
    assert phases == {Phase.CORDONED, Phase.DRAINING, Phase.DOWN, Phase.STARTING}
    assert found(table) == []
    assert why(table) == dict.fromkeys(table.ids(), Exclusion.NOT_SERVING)


def test_a_request_for_an_adapter_goes_where_the_adapter_is(table):
    make_ready(table, "m/b2", models=(BASE, LORA))
    assert found(table, route=LORA_ROUTE) == ["b2"]
    missing = Exclusion.MODEL_MISSING
    assert why(table, route=LORA_ROUTE) == {"m/b1": missing, "m/b3": missing}


def test_a_backend_with_its_own_name_for_the_only_model_holds_the_pools_model(table):
    make_ready(table, "m/b1", models=(ServedModel("org/other-name", None, 4096),))
    assert "b1" in found(table)


def test_a_backend_with_several_models_none_of_them_ours_lacks_the_model(table):
    make_ready(table, "m/b1", models=(ServedModel("x", None, 1), ServedModel("y", None, 1)))
    assert why(table) == {"m/b1": Exclusion.MODEL_MISSING}


def test_a_backend_that_does_not_tell_its_endpoints_is_asked_anyway(table):
    assert found(table, asked=call(endpoint=Endpoint.RERANK)) == ["b1", "b2", "b3"]


def test_a_backend_that_tells_its_endpoints_is_asked_for_no_others(table):
    make_ready(table, "m/b1", endpoints=frozenset({Endpoint.CHAT}))
    asked = call(endpoint=Endpoint.EMBEDDINGS)
    assert found(table, asked=asked) == ["b2", "b3"]
    assert why(table, asked=asked) == {"m/b1": Exclusion.ENDPOINT_MISSING}


@pytest.mark.parametrize(
    ("demand", "fits"),
    [
        (Demand(prompt_tokens=4096, exact=True), True),
        (Demand(prompt_tokens=4097, exact=True), False),
        (Demand(prompt_tokens=4000, exact=True, max_new_tokens=96), True),
        (Demand(prompt_tokens=4000, exact=True, max_new_tokens=97), False),
        (Demand(prompt_tokens=1_000_000, exact=False), True),  # a bound excludes nobody
    ],
)
def test_only_an_exact_count_excludes_a_small_window(table, demand, fits):
    expected = None if fits else Exclusion.WINDOW_TOO_SMALL
    assert obstacle(table.get("m/b1"), ask(demand=demand), NOW) is expected


def test_a_backend_of_unknown_window_is_never_too_small(table):
    make_ready(table, "m/b1", models=(ServedModel("m", None, None),))
    assert found(table, demand=Demand(10**9, exact=True)) == ["b1"]


def test_a_full_kv_cache_takes_nothing_only_while_it_was_seen_lately(table):
    scrape(table, "m/b1", running=1, kv=0.95)
    assert why(table) == {"m/b1": Exclusion.KV_FULL}
    assert "b1" in found(table, now=NOW + 60)


def test_a_long_queue_in_the_engine_takes_nothing(table):
    scrape(table, "m/b1", running=8, waiting=8)
    assert why(table) == {"m/b1": Exclusion.ENGINE_QUEUED}


def test_a_request_goes_where_its_need_fits_into_the_kv_cache(table):
    scrape(table, "m/b1", running=1, kv=0.5, capacity=10_000)
    scrape(table, "m/b2", running=1, kv=0.5, capacity=20_000)
    scrape(table, "m/b3", running=0, kv=0.0, capacity=3_000)
    assert found(table, need=Need(3000, 1001)) == ["b2"]
    assert why(table, need=Need(3000, 1001)) == {
        "m/b1": Exclusion.NO_KV_ROOM,
        "m/b3": Exclusion.TOO_LARGE,
    }
    assert found(table, need=Need(2000, 1000)) == ["b1", "b2", "b3"]


def test_what_would_not_fit_either_once_it_serves_again_is_too_large(table):
    for name, capacity in (("m/b1", 3_000), ("m/b2", 20_000)):
        scrape(table, name, running=0, kv=0.0, capacity=capacity)
        make_down(table, name)
    assert why(table, need=Need(3000, 1)) == {
        "m/b1": Exclusion.TOO_LARGE,
        "m/b2": Exclusion.NOT_SERVING,
    }


def test_what_is_barred_is_left_alone(table):
    assert chosen(table, barred={"m/b1", "m/b3"}) == "b2"
    assert chosen(table, barred=set(table.ids())) is None
    assert obstacle(table.get("m/b1"), ask(), NOW, {"m/b1"}) is Exclusion.CLAIMED


def test_a_bar_hides_no_reason_that_waiting_does_not_cure(table):
    large = ask(demand=Demand(5000, exact=True))
    assert obstacle(table.get("m/b1"), large, NOW, {"m/b1"}) is Exclusion.WINDOW_TOO_SMALL


def test_the_last_places_are_for_the_highest_priority():
    table = table_of(pools(m=[{"url": URLS[0], "max_in_flight": 10}]))
    make_ready(table, "m/b1")
    for _ in range(9):
        table.take("m/b1", NOW)
    low, high = Caller("k", "n", "t", priority=0), Caller("k", "n", "t", priority=9)
    assert found(table, caller=low, top_priority=9) == ["b1"]
    table.highest_came("m", NOW)
    assert why(table, caller=low, top_priority=9) == {"m/b1": Exclusion.AT_LIMIT}
    assert found(table, caller=high, top_priority=9) == ["b1"]
    assert found(table, caller=low, top_priority=None) == ["b1"]


LOW, HIGH = Caller("k", "n", "t", priority=0), Caller("k", "n", "t", priority=9)
LONG, SHORT = Need(5000, 10, streams=True), Need(100, 10, streams=True)


def two_read_long_prompts(table):
    """Have b1 and b2 read, at a known pace, and b3 write a lot; the highest class comes."""
    for backend in table:
        backend.limit.reading.rate.learn(NOW, 1.0, 10_000)
    for name in ("m/b1", "m/b2"):
        table.take(name, NOW, LONG)
    for _ in range(5):
        table.first_token(table.take("m/b3", NOW, Need(1, 400, streams=True)), NOW)
    table.highest_came("m", NOW)


def test_long_prompts_of_others_leave_a_backend_free_for_the_highest_class(table):
    assert found(table, caller=LOW, top_priority=9, need=LONG) == ["b1", "b2", "b3"]
    two_read_long_prompts(table)
    low = {"caller": LOW, "top_priority": 9}
    assert set(why(table, **low, need=LONG).values()) == {Exclusion.READING}
    assert chosen(table, **low, need=LONG) is None
    assert found(table, **low, need=SHORT) == ["b3"]  # one that is soon read may go there
    assert found(table, now=NOW + 11, **low, need=LONG) == ["b3"]  # the highest class is away
    assert found(table, caller=LOW, top_priority=None, need=LONG) == ["b3"]


def test_the_highest_class_goes_where_least_is_to_be_read_however_much_is_written_there(table):
    two_read_long_prompts(table)
    assert chosen(table, caller=HIGH, top_priority=9, need=SHORT) == "b3"
    expected_s = told(table, caller=HIGH, top_priority=9, need=SHORT).expected_s
    assert max(expected_s, key=expected_s.get) == "m/b3"


def test_the_highest_class_goes_where_nobody_waits_for_a_place_in_the_batch(table):
    for backend in table:
        backend.limit.reading.rate.learn(NOW, 1.0, 10_000)
    table.take("m/b1", NOW, SHORT)
    for name in ("m/b2", "m/b3"):
        table.take(name, NOW + 0.1, Need(1000, 10, streams=True))
    high = {"caller": HIGH, "top_priority": 9, "need": SHORT}
    assert chosen(table, now=NOW + 0.01, **high) == "b1"
    # The prompt at b1 takes 10 ms to be read, so it waits for something else.
    assert chosen(table, now=NOW + 0.15, **high) in ("b2", "b3")


def test_the_highest_class_leaves_its_cached_prompt_only_for_a_longer_wait_than_its_reading():
    table = table_of(pools(m=URLS))
    for backend_id in ("m/b1", "m/b2", "m/b3"):
        make_ready(table, backend_id).limit.reading.rate.learn(NOW, 1.0, 10_000)
    prefix = Prefix([3, 2, 1], (900, 600, 300), 1000, 1000, 10)
    need = Need(1000, 10, streams=True)
    slot = table.take("m/b1", NOW, need, "t", prefix)
    table.first_token(slot, NOW)
    table.take("m/b1", NOW, Need(1, 10, streams=True))
    high = {"caller": HIGH, "top_priority": 9, "need": need, "prefix": prefix}
    assert chosen(table, now=NOW + 0.05, **high) == "b1"  # to read 900 tokens anew takes 0.09 s
    assert told(table, now=NOW + 0.05, **high).backend_id == "m/b1"
    assert chosen(table, now=NOW + 0.5, **high) in ("b2", "b3")


def test_beside_the_highest_class_less_of_others_prompts_is_sent_ahead(table):
    backend = table.get("m/b1")
    backend.limit.reading.rate.learn(NOW, 1.0, 100_000)
    slot = table.take("m/b1", NOW, Need(1000, 10, streams=True))
    low = {"caller": LOW, "top_priority": 9, "need": Need(2000, 10, streams=True)}
    assert "m/b1" not in why(table, **low)  # 50 ms are 5,000 tokens
    table.highest_came("m", NOW)
    assert why(table, **low)["m/b1"] is Exclusion.READING  # 15 ms are 1,500
    assert "m/b1" not in why(table, **{**low, "caller": HIGH})
    slot.release()
    table.take("m/b1", NOW + 11, Need(1000, 10, streams=True))
    assert "m/b1" not in why(table, now=NOW + 11, **low)


def test_the_only_backend_is_kept_free_for_nobody():
    table = table_of(pools(m=[URLS[0]]))
    make_ready(table, "m/b1").limit.reading.rate.learn(NOW, 1.0, 10_000)
    table.highest_came("m", NOW)
    assert found(table, caller=LOW, top_priority=9, need=LONG) == ["b1"]


def test_with_admission_off_only_a_configured_limit_holds():
    settings = {"admission": "off", "backends": [URLS[0], {"url": URLS[1], "max_in_flight": 1}]}
    table = table_of(pools(m=settings))
    for backend in tuple(table):
        make_ready(table, backend.id)
        scrape(table, backend.id, running=500, waiting=500, kv=1.0, capacity=1000)
        table.take(backend.id, NOW)
    assert found(table, need=Need(9000, 9000)) == ["b1"]
    assert why(table) == {"m/b2": Exclusion.AT_LIMIT}


def test_a_backend_at_its_own_limit_takes_nothing_until_a_slot_comes_back():
    table = table_of(pools(m=[{"url": URLS[0], "max_in_flight": 1}]))
    make_ready(table, "m/b1")
    slot = table.take("m/b1", NOW)
    assert why(table) == {"m/b1": Exclusion.AT_LIMIT}
    slot.release()
    assert found(table) == ["b1"]


# --- which of them --------------------------------------------------------------------------------


def test_the_least_loaded_wins(table):
    scrape(table, "m/b1", running=3)
    scrape(table, "m/b2", running=1)
    scrape(table, "m/b3", running=1, waiting=1)
    assert {chosen(table, seed=seed) for seed in range(50)} == {"b2"}


def test_our_own_requests_count_before_the_next_scrape_shows_them(table):
    for name in ("b1", "b2", "b3"):
        scrape(table, f"m/{name}")
    taken = []
    for _ in range(9):
        name = chosen(table, seed=len(taken))
        taken.append(name)
        table.take(f"m/{name}", NOW)
    assert Counter(taken) == {"b1": 3, "b2": 3, "b3": 3}


def test_an_empty_kv_cache_does_not_make_up_for_load(table):
    scrape(table, "m/b1", running=0, kv=0.85)
    scrape(table, "m/b2", running=1, kv=0.0)
    scrape(table, "m/b3", running=1, kv=0.0)
    assert {chosen(table, seed=seed) for seed in range(50)} == {"b1"}


def test_a_backend_of_unknown_load_never_beats_an_idle_one_that_is_known(table):
    scrape(table, "m/b2", kv=0.9 - 0.01)
    assert {chosen(table, seed=seed) for seed in range(50)} == {"b2"}


def test_equals_are_taken_at_random_and_only_equals(table):
    scrape(table, "m/b1", running=1)
    scrape(table, "m/b2", running=5)
    scrape(table, "m/b3", running=1)
    chooser = Chooser(table, random.Random(7))
    counts = Counter(chooser.find(ask(), NOW).name for _ in range(400))
    assert set(counts) == {"b1", "b3"}
    assert min(counts.values()) > 140


def test_a_long_prompt_that_is_still_to_be_read_weighs_more_than_several_short_ones(table):
    table.take("m/b1", NOW, Need(100_000, 100))
    for _ in range(3):
        table.take("m/b2", NOW, Need(100, 100))
    for _ in range(4):
        table.take("m/b3", NOW, Need(100, 100))
    assert {chosen(table, seed=seed) for seed in range(20)} == {"b2"}


def test_a_prompt_that_was_read_is_no_work_any_more(table):
    first = table.take("m/b1", NOW, Need(100_000, 100, streams=True))
    second = table.take("m/b2", NOW, Need(20_000, 200, streams=True))
    table.take("m/b3", NOW, Need(100_000, 1000))
    assert chosen(table) == "b2"
    for slot in (first, second):
        table.first_token(slot, NOW)
    for name in ("b1", "b2"):
        scrape(table, f"m/{name}", running=1)
    assert chosen(table) == "b1"


def test_a_backend_that_is_surely_slower_takes_as_much_longer_for_the_same_work(table):
    table.get("m/b1").slowness = 4.0
    for name, count in (("b1", 1), ("b2", 3), ("b3", 9)):
        scrape(table, f"m/{name}")
        for _ in range(count):
            table.take(f"m/{name}", NOW, Need(100, 100))
    expected = told(table, need=Need(100, 100)).expected_s
    assert expected["m/b2"] < expected["m/b1"] < expected["m/b3"]


def test_a_pools_pace_is_that_of_its_fastest_member(table):
    for _ in range(3):
        table.get("m/b1").writes.learn(NOW, 1.0, 4000)
        table.get("m/b2").writes.learn(NOW, 1.0, 10)
    table.listen([], NOW)
    assert {each.token_cost.output_s for each in table} == {1 / 4000}


def test_nobody_to_choose_is_told_with_every_reason(table):
    make_down(table, "m/b1")
    scrape(table, "m/b2", running=1, kv=0.95)
    assert chosen(table, tried=["m/b3"]) is None
    assert why(table, tried=["m/b3"]) == {
        "m/b1": Exclusion.NOT_SERVING,
        "m/b2": Exclusion.KV_FULL,
        "m/b3": Exclusion.ALREADY_TRIED,
    }


def test_an_explanation_has_the_choice_all_costs_and_the_reasons_of_the_rest(table):
    scrape(table, "m/b1", running=3)
    scrape(table, "m/b2", running=1)
    make_down(table, "m/b3")
    explained = told(table)
    assert explained.backend_id == "m/b2"
    assert explained.expected_s["m/b2"] < explained.expected_s["m/b1"]
    assert explained.excluded == {"m/b3": Exclusion.NOT_SERVING}
    assert all(backend.in_flight == 0 for backend in table)


def test_an_explanation_of_nobody_has_only_reasons(table):
    explained = told(table, tried=table.ids())
    assert (explained.backend_id, explained.expected_s) == (None, {})
    assert explained.excluded == dict.fromkeys(table.ids(), Exclusion.ALREADY_TRIED)


# --- names ----------------------------------------------------------------------------------------


def catalog_of(config, models=None, endpoints=None):
    """Build a catalog over backends that are ready with `models`, by backend id."""
    table = table_of(config)
    for backend_id, listed in (models or {}).items():
        make_ready(table, backend_id, listed, endpoints)
    return Catalog.build(config, table)


def resolve(catalog, model, caller=ANYONE, endpoint=Endpoint.CHAT):
    return catalog.resolve(call(model, endpoint), caller)


def not_found(catalog, model, caller=ANYONE):
    with pytest.raises(ModelNotFound) as caught:
        resolve(catalog, model, caller)
    return caught.value


def test_without_a_name_the_only_pool_that_a_key_sees_is_meant():
    one = catalog_of(
        pools(m={"backends": URLS[:1], "aliases": ["gpt-4o", "fast"]}), {"m/b1": [BASE, LORA]}
    )
    two = catalog_of(pools(m=URLS[:1], n=URLS[1:2]), {"m/b1": [BASE, LORA]})

    def meant(catalog, *models):
        route = resolve(catalog, "", dataclasses.replace(ANYONE, models=models))
        return route.requested, route.adapter

    assert meant(one, "*") == ("m", None)
    assert meant(one, "fast") == ("fast", None)
    assert meant(one, "fast", "gpt-4o") == ("gpt-4o", None)
    assert meant(one, "lora-a") == ("lora-a", "lora-a")
    assert meant(two, "m") == meant(two, "m", "lora-a") == ("m", None)
    assert meant(two, "n", "other") == ("n", None)
    for catalog, models in ((two, ["*"]), (two, ["n", "lora-a"]), (one, []), (one, ["none"])):
        with pytest.raises(MissingModel) as caught:
            meant(catalog, *models)
        assert caught.value.param == "model"
        assert "GET /v1/models" in caught.value.message


def test_of_several_adapters_none_is_meant():
    twins = [BASE, LORA, ServedModel("lora-b", "m", None)]
    catalog = catalog_of(pools(m=URLS[:1]), {"m/b1": twins})
    with pytest.raises(MissingModel):
        resolve(catalog, "", dataclasses.replace(ANYONE, models=("lora-*",)))


def test_a_pool_and_its_aliases_lead_to_the_pool():
    catalog = catalog_of(pools(m={"backends": URLS, "aliases": ["gpt-4o", "fast"]}))
    assert set(catalog.entries) == {"m", "gpt-4o", "fast"}
    for name in catalog.entries:
        route = resolve(catalog, name)
        assert (route.requested, route.pool, route.served_model) == (name, "m", "m")
        assert route.adapter is None
        assert catalog.entries[name].parent is None


def test_adapters_of_the_backends_are_names_by_themselves():
    catalog = catalog_of(pools(m=URLS[:2]), {"m/b1": [BASE], "m/b2": [BASE, LORA]})
    route = resolve(catalog, "lora-a")
    assert (route.pool, route.served_model, route.adapter) == ("m", "lora-a", "lora-a")
    assert catalog.entries["lora-a"].parent == "m"


def test_a_list_of_adapters_is_the_whole_list():
    config = pools(m={"backends": URLS[:1], "adapters": ["lora-b"]})
    catalog = catalog_of(config, {"m/b1": [BASE, LORA]})
    assert set(catalog.entries) == {"m", "lora-b"}
    assert resolve(catalog, "lora-b").adapter == "lora-b"


@pytest.mark.parametrize(
    "modules",
    [["law=/adapters/law", "tax=/adapters/tax"], ['{"name": "law", "path": "/l"}', "tax=/t"]],
)
def test_adapters_on_a_launched_server_s_command_line_are_offered_beside_the_list(modules):
    command = ["vllm", "serve", "m", "--enable-lora", "--lora-modules", *modules]
    launched = {"name": "b1", "launch": {"command": command, "port": 8001}}
    catalog = catalog_of(pools(m={"backends": [launched], "adapters": ["lora-a"]}))
    assert {resolve(catalog, name).adapter for name in ("lora-a", "law", "tax")} == {
        "lora-a",
        "law",
        "tax",
    }
    not_found(catalog, "other")


def test_an_empty_list_of_adapters_offers_none():
    config = pools(m={"backends": URLS[:1], "adapters": []})
    assert set(catalog_of(config, {"m/b1": [BASE, LORA]}).entries) == {"m"}


def test_a_base_model_of_another_name_is_no_name_for_clients():
    models = {"m/b1": [ServedModel("org/real-name", None, 4096)]}
    assert set(catalog_of(pools(m=URLS[:1]), models).entries) == {"m"}


@pytest.mark.parametrize("first", ["m", "other"])
def test_a_pool_beats_an_alias_and_an_alias_beats_an_adapter(first):
    shadowing = [BASE, ServedModel("other", "m", None), ServedModel("nick", "m", None)]
    settings = {
        "m": {"backends": URLS[:1], "aliases": ["other"]},
        "other": {"backends": URLS[1:2], "aliases": ["nick"]},
    }
    order = sorted(settings, key=lambda name: name != first)
    config = {name: pools(**{name: settings[name]})[name] for name in order}
    catalog = catalog_of(config, {"m/b1": shadowing})
    for name in ("other", "nick"):
        route = resolve(catalog, name)
        assert (route.pool, route.adapter) == ("other", None)


@pytest.mark.parametrize("name", ["m", "nick", "other"])
def test_an_adapter_that_has_the_name_of_a_pool_or_alias_is_told_of(caplog, name):
    """Whoever means the adapter gets the base model."""
    config = pools(m={"backends": URLS[:1], "aliases": ["nick"]}, other=URLS[1:2])
    table = table_of(config)
    make_ready(
        table, "m/b1", models=[ServedModel("base", None, 4096), ServedModel(name, "m", None)]
    )
    Catalogs(table, ManualClock()).current(config)
    (told,) = caplog.records
    taker = "other" if name == "other" else "m"
    assert told.getMessage() == (
        f"the adapter {name} has the name of the pool {taker}, or of an alias of it, and is held by the pool m:"
        f" requests go to the model of {taker}, and none to the adapter. Rename one"
    )


def test_of_two_pools_with_the_same_adapter_the_first_has_the_name():
    twin = [ServedModel("n", None, 4096), ServedModel("lora-a", "n", None)]
    catalog = catalog_of(pools(m=URLS[:1], n=URLS[1:2]), {"m/b1": [BASE, LORA], "n/b1": twin})
    assert resolve(catalog, "lora-a").pool == "m"


def test_a_name_that_two_pools_claim_is_told_once(caplog):
    config = pools(m=URLS[:1], n=URLS[1:2])
    table = table_of(config)
    catalogs = Catalogs(table, ManualClock())
    make_ready(table, "m/b1", models=[BASE, LORA])
    catalogs.current(config)
    assert caplog.records == []
    make_ready(
        table, "n/b1", models=[ServedModel("n", None, 4096), ServedModel("lora-a", "n", None)]
    )
    for _ in range(2):
        catalogs.current(config)
        make_ready(table, "m/b1", models=[BASE, LORA, ServedModel("lora-b", "m", None)])
    (told,) = caplog.records
    assert told.event == "adapter_clash"
    assert told.getMessage() == (
        "the adapter lora-a is held by the pools m and n: requests for it go to m."
        " List `adapters` of each pool, or rename one"
    )


def test_an_older_request_does_not_make_new_pools_younger():
    """A reload adds a pool while a request of the settings before still looks for another one."""
    before, after = pools(m=URLS[:1]), pools(m=URLS[:1], n=URLS[1:2])
    clock = ManualClock()
    catalogs = Catalogs(table_of(after), clock)
    assert [set(catalogs.current(each).entries) for each in (before, after)] == [{"m"}, {"m", "n"}]
    clock.at += 1000
    assert set(catalogs.of(before).entries) == {"m"}
    catalogs.current(after)
    assert [catalogs.first_seen(name) for name in ("m", "n")] == [int(NOW), int(NOW)]


@pytest.mark.parametrize(
    ("told", "cap", "window"),
    [
        ((None, None), None, None),
        ((4096, None), None, 4096),
        ((4096, 2048), None, 2048),
        ((4096, 2048), 1024, 1024),
        ((4096, 2048), 8192, 2048),
        ((None, None), 8192, 8192),
    ],
)
def test_a_window_is_the_smallest_told_and_capped(told, cap, window):
    settings = {"backends": URLS[:2]} | ({} if cap is None else {"max_context": cap})
    models = {
        f"m/b{place}": [ServedModel("m", None, tokens), LORA]
        for place, tokens in enumerate(told, start=1)
    }
    catalog = catalog_of(pools(m=settings), models)
    assert resolve(catalog, "m").window_tokens == window
    assert resolve(catalog, "lora-a").window_tokens == window


def test_a_model_serves_what_any_of_its_backends_does():
    table = table_of(config := pools(m=URLS[:2]))
    make_ready(table, "m/b1", endpoints=frozenset({Endpoint.CHAT}))
    assert Catalog.build(config, table).entries["m"].endpoints is None  # b2 has not told
    make_ready(table, "m/b2", endpoints=frozenset({Endpoint.EMBEDDINGS}))
    catalog = Catalog.build(config, table)
    assert resolve(catalog, "m", endpoint=Endpoint.EMBEDDINGS).pool == "m"
    with pytest.raises(EndpointNotServed) as caught:
        resolve(catalog, "m", endpoint=Endpoint.RERANK)
    assert caught.value.message == (
        "The model `m` does not serve the rerank endpoint. It serves: chat, embeddings."
    )
    assert (caught.value.status, caught.value.param) == (404, "model")


def test_configured_endpoints_win_over_told_ones():
    config = pools(m={"backends": URLS[:1], "endpoints": ["rerank"]})
    catalog = catalog_of(config, {"m/b1": [BASE]}, endpoints=frozenset({Endpoint.CHAT}))
    assert resolve(catalog, "m", endpoint=Endpoint.RERANK).pool == "m"
    with pytest.raises(EndpointNotServed):
        resolve(catalog, "m")


def test_unknown_and_forbidden_read_the_same():
    catalog = catalog_of(pools(secret=URLS[:1], open=URLS[1:2]))
    caller = Caller("k", "n", "t", models=("open",))
    forbidden, unknown = not_found(catalog, "secret", caller), not_found(catalog, "qqqqqq", caller)
    assert forbidden.message.replace("secret", "X") == unknown.message.replace("qqqqqq", "X")
    for name in ("status", "type", "code", "param", "outcome", "retry_after_s"):
        assert getattr(forbidden, name) == getattr(unknown, name)


def test_a_forbidden_model_does_not_tell_its_endpoints():
    config = pools(secret={"backends": URLS[:1], "endpoints": ["chat"]})
    with pytest.raises(ModelNotFound):
        resolve(catalog_of(config), "secret", Caller("k", "n", "t", models=("x",)), Endpoint.RERANK)


def test_a_near_miss_is_answered_with_the_name():
    catalog = catalog_of(pools(**{"qwen3-8b": URLS[:1]}))
    assert "Did you mean `qwen3-8b`?" in not_found(catalog, "qwen3-8B").message
    assert "Did you mean" not in not_found(catalog, "zzz").message


def test_a_hint_names_only_what_the_caller_may_use():
    catalog = catalog_of(pools(**{"qwen3-8b": URLS[:1], "qwen2-7b": URLS[1:2]}))
    caller = Caller("k", "n", "t", models=("qwen2-*",))
    assert "qwen3-8b" not in not_found(catalog, "qwen3-8", caller).message
    assert "Did you mean `qwen2-7b`?" in not_found(catalog, "qwen2-7", caller).message
    nobody = Caller("k", "n", "t", models=())
    assert "Did you mean" not in not_found(catalog, "qwen2-7b", nobody).message


def test_a_list_of_models_holds_what_the_caller_may_use():
    config = pools(m={"backends": URLS[:1], "aliases": ["nick"]}, n=URLS[1:2])
    catalog = catalog_of(config, {"m/b1": [BASE, LORA]})
    assert set(catalog.visible(ANYONE)) == {"m", "nick", "n", "lora-a"}
    assert set(catalog.visible(Caller("k", "n", "t", models=("lora-*", "n")))) == {"n", "lora-a"}


@pytest.mark.parametrize(
    "name",
    [
        "x" * 10_000_000,
        "a\r\nset-cookie: b",
        "\x1b[31mred",
        "\x00" * 300,
        "\u202eevil",
        "\ud800",
    ],
    ids=["long", "newline", "escape", "zeros", "right-to-left", "surrogate"],
)
def test_a_hostile_name_is_short_and_printable_in_the_message(name):
    error = not_found(catalog_of(pools(m=URLS[:1])), name)
    assert error.message.isprintable()
    assert len(error.message) < 300
    error.message.encode()


# --- what the model list says of a name -----------------------------------------------------------


def test_a_name_is_as_well_as_the_best_backend_that_holds_it(table):
    make_ready(table, "m/b3", models=(BASE, LORA))
    catalog = Catalog.build(pools(m=URLS), table)

    def told(name):
        return status(catalog.entries[name], table.backends("m"))

    assert (told("m"), told("lora-a")) == ("ready", "ready")
    make_degraded(table, "m/b3")
    assert (told("m"), told("lora-a")) == ("ready", "degraded")
    make_down(table, "m/b3")
    assert (told("m"), told("lora-a")) == ("ready", "unavailable")


@pytest.mark.parametrize(
    ("why", "told"),
    [
        (Exclusion.ADAPTER_DUE, "degraded"),  # it is loaded once it is asked for
        (Exclusion.ADAPTER_LOADING, "degraded"),
        (Exclusion.ADAPTER_FAILED, "unavailable"),
        (Exclusion.MODEL_MISSING, "unavailable"),
    ],
)
@pytest.mark.parametrize("listed", [True, False])
def test_an_adapter_that_requests_cannot_have_yet_is_not_called_ready(table, why, told, listed):
    make_ready(table, "m/b3", models=(BASE, LORA) if listed else (BASE,))
    table.withhold(Withheld(table.get("m/b3"), {"lora-a": why}))
    config = pools(m={"backends": URLS, "adapters": ["lora-a"]})
    entry = Catalog.build(config, table).entries["lora-a"]
    assert status(entry, table.backends("m")) == told


# --- what a backend holds of a prompt ---------------------------------------------------------------


class Holds:
    """A prefix cache that holds so many tokens of any prompt."""

    def __init__(self, tokens):
        self.held_tokens = tokens
        self.unsent_keys = []

    def tokens(self, prefix):
        return min(self.held_tokens, prefix.prompt_tokens)

    def longest(self, prefix):
        return len(prefix.keys)

    def sent(self, prefix):
        tokens = self.tokens(prefix)
        return SentPrompt(prefix, tokens, tokens, len(prefix.keys), tokens)

    def read(self, sent):
        pass

    def over(self, sent):
        pass

    def unsent(self, sent):
        self.unsent_keys.append(sent.new_keys)

    def scraped(self, capacity_tokens, hits):
        pass

    def forget(self):
        self.held_tokens = 0


def begins(prompt_tokens=1000):
    return Prefix([7], (4,), 4, prompt_tokens, 10)


def test_a_request_goes_where_most_of_its_prompt_is_cached(table):
    for name, tokens in (("b1", 0), ("b2", 900), ("b3", 500)):
        table.get(f"m/{name}").prefix_index = Holds(tokens)
    wanted = {"need": Need(1000, 10), "prefix": begins()}
    assert {chosen(table, seed=seed, **wanted) for seed in range(10)} == {"b2"}
    seconds = told(table, **wanted).expected_s
    prompt_s = table.get("m/b1").token_cost.prompt_s
    saved = (seconds["m/b1"] - seconds["m/b2"]) / prompt_s
    streams = 2  # itself, and one that may be there while nothing is known; as many are usual
    assert saved == pytest.approx(900 * 2 * streams)


def test_one_busy_backend_makes_no_miss_dearer_elsewhere(table):
    wanted = {"need": Need(1000, 10), "prefix": begins()}
    before = told(table, **wanted).expected_s["m/b2"]
    for _ in range(100):
        table.take("m/b1", NOW, Need(0, 100))
    assert told(table, **wanted).expected_s["m/b2"] == before


def test_a_request_goes_elsewhere_when_reading_anew_takes_less_than_the_wait(table):
    table.get("m/b1").prefix_index = Holds(1000)
    wanted = {"need": Need(1000, 10, streams=True), "prefix": begins()}
    went = []
    for _ in range(300):
        name = chosen(table, seed=len(went), **wanted)
        went.append(name)
        table.take(f"m/{name}", NOW, Need(0, 100))
    assert went[:10] == ["b1"] * 10
    assert {"b2", "b3"} <= set(went)


def test_where_more_waits_to_be_read_than_is_cached_a_request_is_read_elsewhere(table):
    table.get("m/b1").prefix_index = Holds(900)
    wanted = {"need": Need(1000, 10, streams=True), "prefix": begins()}
    table.take("m/b1", NOW, Need(200, 10, streams=True))
    assert chosen(table, **wanted) == "b1"
    table.take("m/b1", NOW, Need(20_000, 10, streams=True))
    assert chosen(table, **wanted) != "b1"


def test_a_request_that_finds_its_prompt_cached_need_not_stand_back_for_less_reading(table):
    backend = table.get("m/b1")
    backend.prefix_index = Holds(900)
    backend.limit.reading.rate.learn(NOW, 1.0, 10_000)  # about 500 are read in 50 ms
    table.take("m/b1", NOW, Need(800, 10, streams=True))
    wanted = {"need": Need(1000, 10, streams=True)}
    assert why(table, **wanted) == {"m/b1": Exclusion.READING}
    assert why(table, **wanted, prefix=begins()) == {}
    table.take("m/b1", NOW, Need(200, 10, streams=True))
    assert why(table, **wanted, prefix=begins()) == {"m/b1": Exclusion.READING}


def waits(table, asked, now, before=None):
    """Return whether a request goes nowhere, and for which backend it waits."""
    return Chooser(table).find(asked, now, NOBODY, before) is None, asked.awaits


def reads(table, backend_id, tokens):
    """Have a backend read so many tokens; it takes no more beside them."""
    backend = table.get(backend_id)
    backend.limit.reading.rate.learn(NOW, 1.0, 10_000)
    table.take(backend_id, NOW, Need(tokens, 10, streams=True))
    return backend


def test_a_request_waits_no_longer_for_where_it_is_cached_where_one_of_second_choice_is_free(table):
    backend = reads(table, "m/b1", 1500)
    backend.prefix_index = Holds(900)
    reads(table, "m/b2", 1500).prefix_index = Holds(0)
    table.get("m/b3").prefix_index = Holds(0)
    wanted = {"need": Need(1600, 10, streams=True), "prefix": begins(1600)}
    longest_s = 2 * 900 * backend.token_cost.prompt_s
    asked = ask(**wanted)
    make_degraded(table, "m/b3")
    assert waits(table, asked, NOW) == (True, "m/b1")
    assert waits(table, asked, NOW + 0.99 * longest_s) == (True, "m/b1")
    assert waits(table, asked, NOW + longest_s) == (False, None)
    make_down(table, "m/b3")
    assert waits(table, asked, NOW + 1 + longest_s) == (True, "m/b1")


def test_a_request_waits_for_where_it_is_cached_twice_as_long_as_reading_anew_takes(table):
    backend = reads(table, "m/b1", 1500)
    backend.prefix_index = Holds(900)
    longest_s = 2 * 900 * backend.token_cost.prompt_s
    for name in ("m/b2", "m/b3"):
        for _ in range(3):  # how many are there changes nothing
            table.take(name, NOW, Need(0, 10))
    asked = ask(need=Need(1600, 10, streams=True), prefix=begins(1600))
    assert waits(table, asked, NOW + 60) == (True, "m/b1")  # since now, however late it is
    assert waits(table, asked, NOW + 60 + 0.9 * longest_s) == (True, "m/b1")
    assert waits(table, asked, NOW + 60 + 1.1 * longest_s) == (False, None)
    assert waits(table, asked, NOW + 90) == (False, None)


def test_one_that_may_not_wait_goes_wherever_is_room(table):
    reads(table, "m/b1", 1500).prefix_index = Holds(900)
    asked = ask(need=Need(1000, 10, streams=True), prefix=begins(), free_at=-math.inf)
    assert waits(table, asked, NOW) == (False, None)


def test_a_request_that_waits_for_one_backend_goes_to_no_worse_one(table):
    reads(table, "m/b1", 1500).prefix_index = Holds(900)
    make_degraded(table, "m/b2")
    asked = ask(need=Need(1000, 10, streams=True), prefix=begins())
    assert waits(table, asked, NOW) == (True, "m/b1")


def test_a_request_that_waits_for_another_revision_goes_to_no_worse_one_either(table):
    for name in ("m/b1", "m/b2"):
        table.get(name).on_trial = True
    make_degraded(table, "m/b3")
    reads(table, "m/b1", 1500).prefix_index = Holds(900)
    asked = ask(need=Need(1000, 10, streams=True), prefix=begins(), on_trial=False)
    assert waits(table, asked, NOW) == (True, "m/b1")


def test_nobody_waits_where_nothing_of_its_prompt_is_cached(table):
    for name in ("b1", "b2"):
        reads(table, f"m/{name}", 1500)
    table.get("m/b3").prefix_index = Holds(0)
    for _ in range(50):
        table.take("m/b3", NOW, Need(0, 10))
    asked = ask(need=Need(1000, 10, streams=True), prefix=begins())
    assert waits(table, asked, NOW) == (False, None)


def test_those_who_wait_for_a_backend_make_it_dearer_for_those_behind_them(table):
    reads(table, "m/b1", 1500).prefix_index = Holds(600)
    before, went = {}, []
    for _ in range(60):
        asked = ask(need=Need(1000, 10, streams=True), prefix=begins())
        went.append(waits(table, asked, NOW, before)[1])
    assert went[0] == "m/b1"
    assert went[-1] is None
    assert went == sorted(went, key=lambda awaited: awaited is None)
    own_s = 400 * table.get("m/b1").token_cost.prompt_s
    assert before["m/b1"] >= went.count("m/b1") * own_s


def test_they_do_so_too_where_nobody_is_ready(table):
    for name in ("m/b1", "m/b2", "m/b3"):
        make_degraded(table, name)
    for seed in range(20):
        chooser = Chooser(table, random.Random(seed))
        found = chooser.find(ask(), NOW, NOBODY, {"m/b1": 10.0, "m/b2": 10.0})
        assert found is not None
        assert found.id == "m/b3"


def test_prompts_that_begin_alike_meet_wherever_it_costs_about_the_same(table):
    def home(seed, number):
        prefix = Prefix([number], (4,), 4, 1000, 10, number)
        return chosen(table, seed=seed, need=Need(1000, 10), prefix=prefix)

    homes = {number: home(0, number) for number in range(60)}
    assert {home(seed, 7) for seed in range(10)} == {homes[7]}
    assert min(Counter(homes.values()).values()) >= 10
    make_down(table, "m/b3")
    moved = [number for number in homes if home(0, number) != homes[number]]
    assert all(homes[number] == "b3" for number in moved)


def test_with_other_gateways_prompts_that_begin_alike_meet_beside_some_work_too(table):
    """What is new here may be on its way to where another gateway sent it, which tells it a moment later."""

    def home(number):
        prefix = Prefix([number], (4,), 4, 1000, 10, number)
        return chosen(table, need=Need(1000, 10), prefix=prefix)

    idle = {number: home(number) for number in range(30)}
    for backend_id, prompt_tokens in (("m/b1", 300), ("m/b2", 100), ("m/b3", 100)):
        table.take(backend_id, NOW, Need(prompt_tokens, 10))
    assert "b1" not in {home(number) for number in idle}
    table.hear({}, 2)
    assert {number: home(number) for number in idle} == idle
    for _ in range(5):  # that is more than what it saves to meet
        table.take("m/b1", NOW, Need(1000, 100))
    assert "b1" not in {home(number) for number in idle}


def test_among_backends_that_have_a_prompt_the_least_busy_gets_it(table):
    for name in ("b1", "b2", "b3"):
        table.get(f"m/{name}").prefix_index = Holds(990)

    def home(number):
        prefix = Prefix([number], (4,), 4, 1000, 10, number)
        return chosen(table, need=Need(1000, 10), prefix=prefix)

    for name in ("m/b1", "m/b3"):
        table.take(name, NOW, Need(0, 10))
    assert {home(number) for number in range(20)} == {"b2"}


@pytest.fixture
def sharing():
    """Three backends that are known by what was sent to them."""
    table = table_of(pools(m=URLS))
    for backend in tuple(table):
        make_ready(table, backend.id)
        scrape(table, backend.id, capacity=100_000)
    table.listen([], NOW)
    return table


def goes_to(table, *keys):
    """Send a prompt where it goes, and have it end at once: 1,000 tokens up to its first hash, 100 to each other."""
    ends = tuple(900 + 100 * place for place in range(len(keys), 0, -1))
    prefix = Prefix([*reversed(keys)], ends, ends[0], ends[0], 10)
    need = Need(ends[0], 10, streams=True)
    name = chosen(table, need=need, prefix=prefix)
    slot = table.take(f"m/{name}", NOW, need, prefix=prefix)
    table.first_token(slot, NOW)
    slot.release()
    return name


def is_busy(table, name):
    """Have a backend write six streams more than the others."""
    for _ in range(6):
        slot = table.take(f"m/{name}", NOW, Need(10, 10, streams=True))
        table.first_token(slot, NOW)


def test_a_beginning_that_very_many_share_is_read_at_an_idle_backend_too(sharing):
    home = goes_to(sharing, 1, 2)
    is_busy(sharing, home)
    went = [goes_to(sharing, 1, 100 + number) for number in range(60)]
    assert went[:2] == [home] * 2  # how many will come is not known yet
    assert home not in went[-10:]  # it is the busy one


def test_the_backends_of_a_pool_count_uses_together_until_their_caches_were_filled_twice(sharing):
    for name, capacity in (("m/b1", 10_000), ("m/b2", 30_000)):
        scrape(sharing, name, capacity=capacity)
    sharing.listen([], NOW)
    uses = sharing.get("m/b1").uses
    assert all(each.uses is uses for each in sharing)
    caches = 10_000 + 30_000 + 100_000
    assert uses.cache_tokens == caches
    for number in range(10):
        goes_to(sharing, 1, 100 + number)
    assert uses.expected(1) > 0
    for _ in range(2):
        uses.sent(SentPrompt(Prefix([], (), 1, caches, 0), 0, 0, 0))
        sharing.listen([], NOW)
    assert uses.expected(1) == 0


def test_a_conversation_stays_where_it_is_for_nobody_else_needs_it(sharing):
    home = goes_to(sharing, 1)
    is_busy(sharing, home)
    assert {goes_to(sharing, *range(1, turns)) for turns in range(3, 60)} == {home}


def test_a_beginning_that_few_share_stays_where_it_is_while_others_fill_the_caches(sharing):
    home = goes_to(sharing, 1, 2)
    is_busy(sharing, home)
    went = []
    for number in range(60):
        went.append(goes_to(sharing, 1, 100 + number))
        for other in range(50):  # prompts of which each comes once
            goes_to(sharing, 1000 + 50 * number + other)
    assert went == [home] * 60


def test_a_session_that_is_known_by_its_name_shares_nothing(sharing):
    """Its prompt begins as many do, but what its name stands for is its own."""
    for number in range(60):
        goes_to(sharing, 1, 100 + number)
    named = Prefix([9, 1], (2, 1), 2, 9000, 10, session=Session(5, NOW))
    sharing.take("m/b1", NOW, Need(9000, 10), prefix=named)
    is_busy(sharing, "b1")
    later = Prefix([8, 1], (2, 1), 2, 9000, 10, session=Session(5, NOW))
    assert chosen(sharing, need=Need(9000, 10, streams=True), prefix=later) == "b1"


def test_what_is_cached_is_no_work_ahead_and_takes_its_room(table):
    backend = table.get("m/b1")
    backend.prefix_index = Holds(900)
    slot = table.take("m/b1", NOW, Need(1000, 10, streams=True), prefix=begins())
    assert backend.room.left() == (100, 10)
    assert backend.room.projection(NOW).tokens is None
    assert backend.room.shares.tokens == 1010
    table.first_token(slot, NOW + 0.1)
    assert backend.room.left() == (0, 10)
    assert backend.limit.reading.rate.at(NOW + 0.1) == pytest.approx(1000)  # the 100 that were read
    slot.release()
    assert backend.room.left() == (0, 0)
    assert backend.prefix_index.unsent_keys == []


def test_a_first_token_teaches_no_pace_by_what_may_have_been_cached(table):
    backend = table.get("m/b1")
    backend.prefix_index = ApproximateIndex()
    known = Prefix([3, 2, 1], (3000, 2000, 1000), 3000, 3000, 10)
    slot = table.take("m/b1", NOW, Need(3000, 10, streams=True), prefix=known)
    table.first_token(slot, NOW + 0.3)
    assert backend.limit.reading.rate.at(NOW + 0.3) == pytest.approx(10_000)
    alike = Prefix([5, 4, 1], (3000, 2000, 1000), 3000, 3000, 10)
    slot = table.take("m/b1", NOW, Need(3000, 10, streams=True), prefix=alike)
    assert slot.credit.unread_tokens == 2000
    table.first_token(slot, NOW + 0.1)  # 1,000 tokens were surely read, up to 1,900 were cached
    assert backend.limit.reading.rate.at(NOW + 0.1) == pytest.approx(10_000, rel=1e-3)


def test_a_prompt_that_was_never_read_is_not_held(table):
    backend = table.get("m/b1")
    backend.prefix_index = Holds(0)
    slot = table.take("m/b1", NOW, Need(1000, 10, streams=True), prefix=begins())
    slot.release()
    slot.release()
    assert backend.prefix_index.unsent_keys == [1]
