import pytest

from gateway.config.models import Config
from gateway.core.endings import Attempt, Ending
from gateway.core.types import (
    Endpoint,
    Exclusion,
    LoadSample,
    ModelsSeen,
    Need,
    Outcome,
    Phase,
    ProbeFailed,
    ProbePassed,
    RequestRecord,
    Route,
    Scraped,
    ScrapeFailed,
    ServedModel,
    TrafficFailed,
    Transition,
    Usage,
    UsageSource,
)
from gateway.pools.health import Order
from gateway.pools.hearing import tells_cached
from gateway.pools.limit import START
from gateway.pools.table import Backend, PoolTable

ONE, TWO = "http://127.0.0.1:8001", "http://127.0.0.1:8002"
BASE = ServedModel("m", None, 4096)
LORA = ServedModel("lora-a", "m", None)


class HeldClock:
    def __init__(self):
        self.at = 100.0

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


@pytest.fixture
def clock():
    return HeldClock()


@pytest.fixture
def table(clock):
    table = PoolTable(clock)
    table.apply(pools(m=[ONE, TWO]))
    return table


def health(**more):
    return Config.model_validate({"pools": {"m": {"backends": [ONE]}}, "health": more}).health


def make_ready(table, backend_id="m/b1", models=(BASE,), endpoints=None, at=100.0):
    table.observe(backend_id, ModelsSeen(at, models, endpoints, "0.32.0"))
    table.observe(backend_id, ProbePassed(at))
    return table.get(backend_id)


def scrape(table, at=100.0, backend_id="m/b1", *, running=1, waiting=0, kv=0.1):
    table.observe(backend_id, Scraped(LoadSample(at, running, waiting, kv)))


# --- what a backend is ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "host", "port", "tls", "header"),
    [
        ("http://10.0.0.1:8000", "10.0.0.1", 8000, False, b"10.0.0.1:8000"),
        ("http://vllm.internal", "vllm.internal", 80, False, b"vllm.internal"),
        ("https://vllm.internal", "vllm.internal", 443, True, b"vllm.internal"),
        ("http://[::1]:8000", "::1", 8000, False, b"[::1]:8000"),
    ],
)
def test_a_backend_knows_where_to_connect(url, host, port, tls, header):
    backend = Backend("m", "b1", url)
    assert (backend.host, backend.port, backend.tls, backend.host_header) == (
        host,
        port,
        tls,
        header,
    )
    assert backend.id == "m/b1"


def test_a_backend_never_shows_its_key():
    assert "sesame" not in repr(Backend("m", "b1", ONE, "sesame"))


def test_a_new_backend_is_starting_and_its_key_is_plain_for_the_request(clock):
    table = PoolTable(clock)
    table.apply(pools(m=[{"url": ONE, "api_key": "sesame"}]))
    backend = table.get("m/b1")
    assert (backend.phase, backend.reason, backend.health.since) == (Phase.STARTING, "new", 100.0)
    assert backend.api_key == "sesame"


# --- load and saturation --------------------------------------------------------------------------


def ahead_s(requests=0, foreign=0):
    """Return the seconds of work of so many small requests of ours, and of so many of others."""
    backend = Backend("m", "b", ONE)
    backend.in_flight, backend.foreign = requests, foreign
    return backend.weighed().ahead_s


def seen_s(backend):
    """Return what the choice sees of it."""
    return (backend.work or backend.weighed()).ahead_s


def test_what_is_ahead_is_what_others_were_seen_to_have_there_and_what_is_ours(table):
    backend = table.get("m/b1")
    before = table.take("m/b1", 100.0)
    scrape(table, 101.0, running=7, waiting=2)
    assert seen_s(backend) == ahead_s(1, 8)
    after = table.take("m/b1", 101.5)
    assert seen_s(backend) == ahead_s(2, 8)
    before.release()
    assert seen_s(backend) == ahead_s(1, 8)
    after.release()
    assert seen_s(backend) == ahead_s(0, 8)


def test_what_is_ahead_is_never_less_than_what_we_know_to_be_there(table):
    backend = table.get("m/b1")
    for _ in range(5):
        table.take("m/b1", 100.0)
    scrape(table, 101.0, running=1)  # its engine is late: the gauge is of before they came
    assert seen_s(backend) == ahead_s(5)


def test_a_prompt_is_no_work_any_more_once_it_is_read(table):
    backend = table.get("m/b1")
    slot = table.take("m/b1", 100.0, Need(1000, 0, streams=True))
    unread_s = seen_s(backend)
    table.first_token(slot, 100.5)
    assert unread_s - seen_s(backend) == pytest.approx(1000 * backend.token_cost.prompt_s)


def test_sequences_of_our_own_batches_are_no_work_of_others(table):
    backend = table.get("m/b1")
    batch = table.take("m/b1", 100.0, Need(0, 0, sequences=8))
    scrape(table, 101.0, running=9, waiting=1)
    assert seen_s(backend) == ahead_s(1, 2)
    batch.release()
    assert seen_s(backend) == ahead_s(0, 2)
    scrape(table, 102.0, running=2)
    assert seen_s(backend) == ahead_s(0, 2)


def test_unknown_work_is_ours_and_one_of_others_so_that_it_never_looks_free(table):
    backend = table.get("m/b1")
    assert backend.stale(100.0)
    assert seen_s(backend) == ahead_s(0, 1) > 0
    table.take("m/b1", 100.0)
    assert seen_s(backend) == ahead_s(1, 1)


def test_a_scrape_older_than_three_seconds_tells_nothing_of_the_work(table):
    backend = table.get("m/b1")
    scrape(table, 100.0, running=50)
    table.listen([], 103.0)
    assert (backend.weighed().ahead_s, backend.stale(103.0)) == (ahead_s(0, 50), False)
    table.listen([], 103.1)
    assert (backend.weighed().ahead_s, backend.stale(103.1)) == (ahead_s(0, 1), True)


def test_a_failed_scrape_does_not_forget_the_sample(table):
    scrape(table, 100.0, running=50)
    table.observe("m/b1", ScrapeFailed(101.0))
    assert table.get("m/b1").weighed().ahead_s == ahead_s(0, 50)


def test_the_kv_cache_closes_at_the_high_mark_and_opens_below_the_low_one(table):
    backend = table.get("m/b1")
    verdicts = []
    for turn, usage in enumerate((0.5, 0.89, 0.90, 0.85, 0.80, 0.79, 0.89)):
        at = 100.0 + 2 * turn  # a dwell apart
        scrape(table, at, kv=usage)
        verdicts.append(backend.saturated(at))
    assert verdicts == [False, False, True, True, True, False, False]


def test_a_stale_kv_usage_saturates_nothing(table):
    scrape(table, 100.0, kv=0.99)
    backend = table.get("m/b1")
    assert backend.saturated(103.0)
    assert not backend.saturated(103.1)


def test_an_idle_backend_takes_work_whatever_its_kv_usage_says(table):
    scrape(table, running=0, kv=0.99)
    backend = table.get("m/b1")
    assert not backend.saturated(100.0)
    table.take("m/b1", 100.0)
    assert backend.saturated(100.0)


def test_what_a_request_needs_is_credited_until_its_slot_comes_back(table):
    backend = table.get("m/b1")
    table.observe("m/b1", Scraped(LoadSample(100.0, 1, 0, 0.5, 10_000)))
    slot = table.take("m/b1", 100.0, Need(3000, 500))
    assert backend.obstacle(Need(501, 0), 100.0) is Exclusion.NO_KV_ROOM
    assert backend.obstacle(Need(500, 0), 100.0) is None
    slot.release()
    assert backend.obstacle(Need(4000, 0), 100.0) is None
    assert backend.room.sequences == 0


def test_what_a_batch_needs_counts_as_given_back_whole_with_the_time_for_which_it_was_held(table):
    make_ready(table)
    batch = table.take("m/b1", 100.0, Need(50_000, 4000, sequences=2))
    other = table.take("m/b1", 103.0, Need(100, 100))
    backend = table.get("m/b1")
    batch.release()
    assert backend.turnover.ends(110.0) == (54_000, 540_000.0)
    other.release()
    assert backend.turnover.ends(110.0) == (200, 1400.0)


def test_a_prompt_that_streams_is_read_at_its_first_token_others_at_the_next_scrape(table):
    backend = table.get("m/b1")
    streamed = table.take("m/b1", 100.0, Need(3000, 400, streams=True))
    table.take("m/b1", 100.0, Need(2000, 400))
    table.observe("m/b1", Scraped(LoadSample(101.0, 2, 0, 0.22, 10_000)))
    assert backend.room.projection(101.0).tokens == 2200 + 3400 + 100
    table.first_token(streamed, 101.5)
    table.observe("m/b1", Scraped(LoadSample(102.0, 2, 0, 0.54, 10_000)))
    assert backend.room.projection(102.0).tokens == 5400 + 100 + 100


def test_the_pace_of_streams_that_ended_tells_what_newer_ones_have_written(table):
    backend = table.get("m/b1")
    table.observe("m/b1", Scraped(LoadSample(100.0, 1, 0, 0.1, 10_000)))
    table.first_token(table.take("m/b1", 100.0, Need(3000, 400, streams=True)), 100.5)
    assert backend.room.projection(101.0).tokens == 1000 + 3400
    record = RequestRecord("r", Endpoint.CHAT, 100.0, backend_id="m/b1", stream=True)
    record.outcome, record.usage = Outcome.OK, Usage(5, 101, UsageSource.UPSTREAM)
    record.sent_at = record.first_byte_at = 100.0
    record.ended_at = 100.5  # 5 ms between two tokens
    table.ended([record])
    assert backend.room.projection(101.0).tokens == 1000 + 3000 + 100 + 150


def test_a_first_token_after_the_end_of_its_request_says_nothing(table):
    backend = table.get("m/b1")
    slot = table.take("m/b1", 100.0, Need(3000, 400, streams=True))
    slot.release()
    table.first_token(slot, 109.0)
    assert backend.limit.reading.rate.at(109.0) is None
    table.apply(pools(m=[TWO]))
    table.first_token(slot, 109.0)


def test_a_first_token_that_does_not_tell_when_its_prompts_were_read_says_nothing(table):
    slot = table.take("m/b1", 100.0, Need(40_000, 400))  # a batch that streams
    table.first_token(slot, 100.5)
    assert table.get("m/b1").limit.reading.rate.at(100.5) is None


def test_what_is_unread_is_an_obstacle_but_for_the_highest_of_several_classes(table):
    backend = table.get("m/b1")
    slot = table.take("m/b1", 100.0, Need(20_000, 10, streams=True))
    # Nobody knows how fast.
    assert backend.obstacle(Need(1, 0), 100.0, 0, 5, to_read=20_000) is None
    table.first_token(slot, 101.0)
    assert backend.obstacle(Need(1, 0), 101.0, 0, 5, to_read=20_000) is None
    table.take("m/b1", 101.0, Need(900, 10, streams=True))
    for classes in ((0, 5), (0, None)):
        # 20,000/s: 1,000 in 50 ms.
        assert backend.obstacle(Need(1, 0), 101.0, *classes, to_read=100) is None
        assert backend.obstacle(Need(1, 0), 101.0, *classes, to_read=101) is Exclusion.READING
        # Its output is not read.
        assert backend.obstacle(Need(900, 0), 101.0, *classes, to_read=100) is None
    assert backend.obstacle(Need(1, 0), 101.0, 5, 5, to_read=101) is None


def test_a_lower_class_does_not_look_ahead_while_the_highest_is_there(table):
    backend = table.get("m/b1")
    backend.room.writing.wrote(0.01)
    for output in (2000, 4000):  # half of each is written
        began = 100.0 - output / 2 * 0.01
        table.first_token(table.take("m/b1", began, Need(0, output, streams=True)), began)
    table.observe("m/b1", Scraped(LoadSample(100.0, 2, 0, 0.5, 10_000)))
    table.highest_came("m", 100.0)
    need = Need(2000, 10, streams=True)
    assert backend.obstacle(need, 100.0, 5, 5) is None
    assert backend.obstacle(need, 100.0, 0, 5) is Exclusion.NO_KV_ROOM


@pytest.mark.parametrize("beside_highest", [True, False])
def test_a_full_batch_is_not_soon_tried_with_more_beside_the_highest_class(table, beside_highest):
    slots, limit = [table.take("m/b1", 99.0) for _ in range(20)], table.get("m/b1").limit
    scrape(table, 100.0, running=16)
    for at in (101.0, 102.0):
        scrape(table, at, running=16, waiting=4)
    for each in slots[16:]:
        each.release()
    assert limit.value == 16
    for second in range(103, 200):
        if beside_highest:
            table.highest_came("m", float(second))
        scrape(table, float(second), running=16)
    assert (limit.value == 16) is beside_highest


def test_with_admission_off_prompts_that_are_read_hold_nobody_up(clock):
    table = PoolTable(clock)
    table.apply(pools(m={"backends": [ONE], "admission": "off"}))
    table.first_token(table.take("m/b1", 100.0, Need(1000, 10, streams=True)), 101.0)
    table.take("m/b1", 101.0, Need(9000, 10, streams=True))
    assert table.get("m/b1").obstacle(Need(9000, 0), 101.0, 0, 5) is None


def test_refusals_of_the_engine_lower_its_limit_at_the_next_scrape_and_are_told(table):
    cuts = []
    table.on_cut.append(lambda *cut: cuts.append(cut))
    backend = table.get("m/b1")
    slots = [table.take("m/b1", 100.0) for _ in range(10)]
    table.observe("m/b1", TrafficFailed(100.0, Ending.FULL))
    table.observe("m/b9", TrafficFailed(100.0, Ending.FULL))
    scrape(table, 101.0, running=10)
    assert cuts == [("m/b1", "refused")]
    assert backend.allowed(101.0) < START
    assert len(slots) == backend.in_flight


def test_late_first_tokens_lower_the_limit(table):
    cuts = []
    table.on_cut.append(lambda *cut: cuts.append(cut))
    table.first_token(table.take("m/b1", 100.0, Need(10, 10, streams=True)), 100.1)
    for _ in range(20):
        table.first_token(table.take("m/b1", 100.0, Need(10, 10, streams=True)), 110.0)
    scrape(table, 110.0, running=20)
    assert cuts == [("m/b1", "late")]


def test_the_most_in_flight_of_the_window_is_what_a_limit_is_judged_by(table):
    backend = table.get("m/b1")
    for slot in [table.take("m/b1", 100.0) for _ in range(START // 2)]:
        slot.release()
    scrape(table, 101.0)
    grown = backend.allowed(101.0)
    assert grown > START  # half of it was used, if not at the scrape
    scrape(table, 102.0)
    assert backend.allowed(102.0) == grown  # none was since


def test_a_backend_that_restarted_starts_slowly(table):
    backend = table.get("m/b1")
    table.observe("m/b1", Scraped(LoadSample(100.0, 1, 0, 0.1, progress=500.0)))
    assert backend.allowed(100.0) == START
    table.observe("m/b1", Scraped(LoadSample(101.0, 1, 0, 0.1, progress=3.0)))
    assert backend.allowed(101.0) == START // 10
    assert backend.allowed(161.0) == START


def test_with_admission_off_there_is_no_limit_but_a_configured_one(clock):
    table = PoolTable(clock)
    table.apply(pools(m={"backends": [ONE, {"url": TWO, "max_in_flight": 2}], "admission": "off"}))
    for backend_id in ("m/b1", "m/b2"):
        scrape(table, backend_id=backend_id, running=99, waiting=99, kv=1.0)
        table.take(backend_id, 100.0)
    one, two = table.get("m/b1"), table.get("m/b2")
    assert (one.allowed(100.0), two.allowed(100.0)) == (None, 2)
    assert not one.saturated(100.0)
    assert not two.saturated(100.0)
    table.take("m/b2", 100.0)
    assert two.saturated(100.0)


def test_a_configured_limit_saturates_by_itself(clock):
    table = PoolTable(clock)
    table.apply(pools(m=[{"url": ONE, "max_in_flight": 2}]))
    backend = table.get("m/b1")
    first = table.take("m/b1", 100.0)
    assert not backend.saturated(100.0)
    table.take("m/b1", 100.0)
    assert backend.saturated(100.0)
    first.release()
    assert not backend.saturated(100.0)


def test_an_engine_works_as_long_as_fresh_metrics_show_progress_with_our_requests_in_it(
    table, clock
):
    backend = table.get("m/b1")

    def seen(at, progress, running=1, waiting=0):
        clock.at = at
        table.observe("m/b1", Scraped(LoadSample(at, running, waiting, 0.1, progress=progress)))
        return backend.works(100.0, clock.at)

    table.take("m/b1", 100.0)
    assert not seen(100.0, 5)  # what was before is not known
    assert not seen(101.0, 5)  # nothing moved
    assert seen(102.0, 6)
    assert not backend.works(102.0, clock.at)
    assert seen(103.0, 6)  # still after 100
    clock.at = 107.0
    assert not backend.works(100.0, clock.at)  # too old to tell
    for _ in range(2):
        table.take("m/b1", 107.0)
    assert seen(108.0, 7, running=1)  # two were just sent
    seen(109.0, 8, running=1)
    assert not backend.works(108.5, clock.at)  # two are missing
    seen(110.0, 9, running=2, waiting=1)
    assert backend.works(109.5, clock.at)
    seen(111.0, 10, running=0)
    assert not backend.works(110.5, clock.at)


def test_a_saturated_backend_stays_ready(table):
    backend = make_ready(table)
    scrape(table, running=1000, waiting=1000, kv=1.0)
    assert backend.phase is Phase.READY


def test_only_replies_of_endpoints_that_told_it_say_that_nothing_was_cached(table):
    backend = table.get("m/b1")
    assert tells_cached(backend, Endpoint.CHAT, None)  # nobody tells: its counter does
    assert tells_cached(backend, Endpoint.RESPONSES, 0)
    assert not tells_cached(backend, Endpoint.CHAT, None)
    assert tells_cached(backend, Endpoint.RESPONSES, None)
    assert tells_cached(backend, Endpoint.CHAT, 16)
    assert tells_cached(backend, Endpoint.CHAT, None)
    assert not tells_cached(backend, Endpoint.COMPLETIONS, None)
    backend.forget_prefixes()  # it is another process
    assert tells_cached(backend, Endpoint.CHAT, None)
    assert tells_cached(backend, Endpoint.COMPLETIONS, None)


def test_releasing_twice_counts_once(table):
    slot, _ = table.take("m/b1", 100.0), table.take("m/b1", 100.0)
    slot.release()
    slot.release()
    assert table.get("m/b1").in_flight == 1


def test_a_slot_on_an_unknown_backend_is_an_error(table):
    with pytest.raises(KeyError):
        table.take("m/b9", 100.0)


# --- models ---------------------------------------------------------------------------------------


def test_the_model_list_tells_window_adapters_endpoints_and_version(table):
    wide = ServedModel("m-again", None, 8192)
    backend = make_ready(table, models=(BASE, wide, LORA), endpoints=frozenset({Endpoint.CHAT}))
    assert backend.window_tokens == 4096
    assert backend.adapters == ("lora-a",)
    assert backend.endpoints == {Endpoint.CHAT}
    assert backend.version == "0.32.0"
    assert backend.base_model == "m"


@pytest.mark.parametrize("window", [4096, None])
def test_of_several_models_the_window_is_that_of_the_pools_own(table, window):
    others = ServedModel("embedder", None, 512), ServedModel("large", None, 8192)
    backend = make_ready(table, models=(*others, ServedModel("m", None, window)))
    assert backend.window_tokens == window


def test_while_none_of_several_models_is_the_pools_the_smallest_window_counts(table):
    others = ServedModel("embedder", None, 512), ServedModel("large", None, 8192)
    assert make_ready(table, models=others).window_tokens == 512


@pytest.mark.parametrize(
    ("settings", "listed", "expected"),
    [
        ({}, ["m", "x"], "m"),
        ({"aliases": ["gpt-4o"]}, ["x", "gpt-4o"], "gpt-4o"),
        ({}, ["Qwen/Qwen3-8B"], "Qwen/Qwen3-8B"),
        ({}, ["x", "y"], None),
        ({"served_model": "x"}, ["m", "x"], "x"),
        ({"served_model": "z"}, ["x"], None),
    ],
    ids=["pool name", "alias", "the only one", "ambiguous", "configured", "configured, missing"],
)
def test_which_model_of_the_backend_is_the_pools(clock, settings, listed, expected):
    table = PoolTable(clock)
    table.apply(pools(m={"backends": [ONE], **settings}))
    backend = make_ready(table, models=tuple(ServedModel(name, None, 10) for name in listed))
    assert backend.base_model == expected


def test_the_name_sent_is_the_adapters_or_what_the_backend_calls_the_model(table):
    backend = make_ready(table, models=(ServedModel("org/base", None, 10), LORA))
    assert backend.served_name(Route("m", "m", "m")) == "org/base"
    assert backend.served_name(Route("lora-a", "m", "lora-a", adapter="lora-a")) == "lora-a"


def test_a_vanished_model_unroutes_that_name_only(table):
    backend = make_ready(table, models=(BASE, LORA))
    epoch = table.epoch
    table.observe("m/b1", ModelsSeen(101.0, (BASE,)))
    assert backend.phase is Phase.READY
    assert (backend.adapters, backend.base_model) == ((), "m")
    assert table.epoch > epoch
    table.observe("m/b1", ModelsSeen(102.0, (LORA,)))
    assert (backend.adapters, backend.base_model) == (("lora-a",), None)
    assert backend.phase is Phase.READY


def test_the_epoch_stands_still_while_nothing_changes(table):
    make_ready(table, models=(BASE, LORA))
    epoch = table.epoch
    make_ready(table, models=(BASE, LORA))
    scrape(table)
    table.observe("m/b1", TrafficFailed(100.0, Ending.STREAM))
    assert table.epoch == epoch


@pytest.mark.parametrize(
    "models", [(BASE, LORA), (ServedModel("m", None, 2048),), (ServedModel("other", None, 4096),)]
)
def test_the_epoch_grows_with_adapters_windows_and_names(table, models):
    make_ready(table)
    epoch = table.epoch
    table.observe("m/b1", ModelsSeen(101.0, models))
    assert table.epoch > epoch


def test_configured_endpoints_win_over_what_the_backend_tells(clock):
    table = PoolTable(clock)
    backend = {"url": TWO, "endpoints": ["embeddings"]}
    table.apply(pools(m={"backends": [ONE, backend], "endpoints": ["chat"]}))
    told = frozenset({Endpoint.COMPLETIONS})
    assert make_ready(table, "m/b1", endpoints=told).endpoints == {Endpoint.CHAT}
    assert make_ready(table, "m/b2", endpoints=told).endpoints == {Endpoint.EMBEDDINGS}
    table.apply(pools(m={"backends": [ONE, backend]}))
    assert table.get("m/b1").endpoints is None
    assert make_ready(table, "m/b1", endpoints=told).endpoints == told


# --- health ---------------------------------------------------------------------------------------


def test_a_change_of_phase_is_told_recorded_and_returned(table):
    told = []
    table.on_transition.append(told.append)
    table.observe("m/b1", ModelsSeen(101.0, (BASE,)))
    transition = table.observe("m/b1", ProbePassed(101.5))
    assert isinstance(transition, Transition)
    assert (transition.backend_id, transition.before, transition.after, transition.at) == (
        "m/b1",
        Phase.STARTING,
        Phase.READY,
        101.5,
    )
    assert told == [transition] == list(table.transitions)
    backend = table.get("m/b1")
    assert (backend.phase, backend.health.since, backend.reason) == (Phase.READY, 101.5, "healthy")


def test_the_reason_is_kept_up_to_date_within_a_phase(table):
    table.observe("m/b1", ProbeFailed(100.0, "refused"))
    table.observe("m/b1", ProbeFailed(101.0, "http_503"))
    assert table.get("m/b1").reason == "http_503"
    assert not table.transitions


def test_the_ring_of_transitions_is_bounded(table):
    for _ in range(600):
        table.order("m/b1", Order.CORDON)
        table.order("m/b1", Order.RESUME)
    assert len(table.transitions) == 1000


def test_failed_requests_are_counted_where_the_handler_looks(table):
    backend = make_ready(table)
    for _ in range(5):
        table.observe("m/b1", TrafficFailed(101.0, Ending.STREAM))
    assert (backend.health.traffic_failures, backend.phase) == (5, Phase.DEGRADED)
    assert table.serving() == (1, 2)


def test_an_observation_of_a_backend_that_left_is_dropped(table):
    table.apply(pools(m=[TWO]))
    assert table.observe("m/b2", ProbePassed(101.0)) is None


def test_orders_are_carried_out_and_repeats_change_nothing(table):
    make_ready(table)
    assert table.order("m/b1", Order.CORDON).after is Phase.CORDONED
    assert table.order("m/b1", Order.CORDON) is None
    assert table.serving() == (0, 2)
    assert table.order("m/b1", Order.RESUME).after is Phase.READY


def test_the_health_settings_decide_the_thresholds(clock):
    table = PoolTable(clock)
    table.apply(pools(m=[ONE]), health(fall=1, rise=1, progress="5s", scrape_stale="1s"))
    backend = make_ready(table)
    table.observe("m/b1", ProbeFailed(101.0, "timeout"))
    assert backend.phase is Phase.DOWN
    assert make_ready(table).phase is Phase.READY
    scrape(table, 110.0, running=1)
    scrape(table, 115.0, running=1)
    assert backend.reason == "no_progress"
    assert backend.stale(116.5)


# --- membership -----------------------------------------------------------------------------------


def test_a_reload_keeps_what_did_not_change(table):
    backend = make_ready(table)
    slot = table.take("m/b1", 100.0)
    table.apply(pools(m=[ONE, TWO], other=["http://127.0.0.1:8003"]))
    assert table.get("m/b1") is backend
    assert (backend.phase, backend.in_flight) == (Phase.READY, 1)
    assert table.ids() == {"m/b1", "m/b2", "other/b1"}
    assert [each.id for each in table] == ["m/b1", "m/b2", "other/b1"]
    assert set(table.pools()) == {"m", "other"}
    slot.release()
    assert backend.in_flight == 0


def test_one_that_is_scraped_no_more_since_a_reload_has_lost_no_metrics(table):
    """As where several vLLMs turn out to be behind one address."""
    make_ready(table)
    scrape(table, waiting=40)
    table.apply(pools(m=[{"url": ONE, "engine": "openai"}, TWO]))
    make_ready(table, at=101.0)
    backend = table.get("m/b1")
    table.apply(pools(m={"engine": "openai", "backends": [ONE, TWO]}))
    assert table.get("m/b1") is backend  # it was one before
    table.observe("m/b1", ProbePassed(130.0))
    assert (backend.phase, backend.sample) == (Phase.READY, None)


def test_a_reload_changes_limits_in_place(table):
    backend = make_ready(table)
    changed = {"backends": [{"url": ONE, "max_in_flight": 1}, TWO]}
    table.apply(pools(m={**changed, "kv": {"stop_admitting": 0.5, "resume": 0.4}}))
    scrape(table, kv=0.6)
    assert table.get("m/b1") is backend
    assert backend.limit.value == backend.allowed(100.0) == 1
    assert backend.obstacle(Need(1, 0), 100.0) is Exclusion.KV_FULL
    slot = table.take("m/b1", 100.0)
    assert backend.obstacle(Need(1, 0), 100.0) is Exclusion.AT_LIMIT
    table.apply(pools(m=[ONE, TWO]))
    assert (slot.credit.held, backend.in_flight) == (True, 1)
    scrape(table, 102.0, kv=0.6)
    assert not backend.saturated(102.0)


@pytest.mark.parametrize(
    "changed",
    [{"url": TWO}, {"url": ONE, "api_key": "new"}, {"url": ONE, "engine": "openai"}],
)
def test_another_address_key_or_engine_is_another_backend(clock, changed):
    table = PoolTable(clock)
    table.apply(pools(m=[ONE]))
    old = make_ready(table)
    table.apply(pools(m=[changed]))
    assert old.phase is Phase.STOPPED
    assert table.get("m/b1").phase is Phase.STARTING


def test_a_removed_backend_with_requests_drains_and_then_stops(table):
    backend = make_ready(table)
    slots = [table.take("m/b1", 100.0) for _ in range(2)]
    table.apply(pools(m=[{"name": "b2", "url": TWO}]))
    assert backend.phase is Phase.DRAINING
    assert list(table.leaving()) == [backend]
    assert table.get("m/b1") is None
    assert [each.id for each in table.backends("m")] == ["m/b2"]
    slots[0].release()
    assert backend.phase is Phase.DRAINING
    slots[1].release()
    assert (backend.phase, backend.in_flight) == (Phase.STOPPED, 0)
    assert not table.leaving()


def test_a_removed_pool_leaves_nothing(table):
    table.apply(pools(other=[ONE]))
    assert table.backends("m") == ()
    assert not table.leaving()
    assert {each.after for each in table.transitions} == {Phase.STOPPED}


def test_slots_of_a_replaced_backend_never_touch_its_successor(table):
    old = make_ready(table)
    slot = table.take("m/b1", 100.0)
    table.apply(pools(m=["http://127.0.0.1:9999", TWO]))
    new = table.get("m/b1")
    table.take("m/b1", 100.0)
    slot.release()
    assert (old.in_flight, old.phase, new.in_flight) == (0, Phase.STOPPED, 1)


def test_nor_does_their_first_token(table):
    make_ready(table)
    slot = table.take("m/b1", 100.0, Need(3000, 10, streams=True))
    table.apply(pools(m=["http://127.0.0.1:9999", TWO]))
    new = table.get("m/b1")
    table.first_token(slot, 101.0)
    assert new.room.unread_tokens == 0
    assert new.limit.reading.rate.at(101.0) is None


def test_listeners_hear_of_members_and_of_capacity(table):
    members, capacity = [], []
    table.on_members.append(lambda: members.append(1))
    table.on_capacity.append(capacity.append)
    slot = table.take("m/b1", 100.0)
    assert not capacity
    slot.release()
    assert capacity == ["m"]
    scrape(table)
    assert capacity == ["m", "m"]
    make_ready(table)
    assert capacity == ["m"] * 4
    epoch = table.epoch
    table.apply(pools(m=[ONE, TWO]))
    assert members == [1]
    assert table.epoch > epoch


def test_listeners_hear_of_each_prompt_that_was_read_once(table):
    read = []
    table.on_read.append(lambda *told: read.append(told))
    slot = table.take("m/b1", 100.0, Need(10, 10, streams=True))
    assert not read
    table.first_token(slot, 100.1)
    assert read == [("m", pytest.approx(0.1), 10)]
    slot.release()
    table.first_token(slot, 100.2)
    assert len(read) == 1


def test_unknown_load_weighs_more_than_an_idle_backend_that_shows_its_load(table):
    scrape(table, running=0)
    assert table.get("m/b1").weighed().ahead_s == 0
    assert table.get("m/b2").weighed().ahead_s > 0


BROKE = Attempt("m/b1", "e", 100.0, 129.0, Ending.STREAM)


@pytest.mark.parametrize(("resumed", "failed"), [(0, ()), (1, ()), (0, (BROKE,))])
def test_the_pause_of_a_stream_that_broke_off_is_not_held_against_who_writes_it(
    table, resumed, failed
):
    backend = table.get("m/b1")
    table.observe("m/b1", ProbePassed(100.0))
    slots = [table.take("m/b1", 100.0) for _ in range(4)]
    table.observe("m/b1", Scraped(LoadSample(100.0, 4, 0, 0.1)))
    before = backend.limit.value
    usage = Usage(5, 11, UsageSource.UPSTREAM)
    for ended_at in (*[100.1] * 50, *[130.0] * 50):  # at its best, and after a pause
        record = RequestRecord("r", Endpoint.CHAT, 100.0, backend_id="m/b1", stream=True)
        record.outcome, record.usage = Outcome.OK, usage
        if ended_at > 101.0:
            record.resumed, record.failed = resumed, failed
        record.sent_at = record.first_byte_at = 100.0
        record.ended_at = ended_at
        table.ended([record])
    table.observe("m/b1", Scraped(LoadSample(131.0, 4, 0, 0.1)))
    assert (backend.limit.value < before) is not bool(resumed or failed)
    for slot in slots:
        slot.release()


@pytest.mark.parametrize(
    ("prefix", "servers", "per_s"),
    [("approximate", 1, 10_000), ("off", 2, 10_000), ("approximate", 2, 160_000)],
)
def test_what_an_engine_found_cached_shows_no_faster_reading(clock, prefix, servers, per_s):
    """In a pool with an index, that knows what was cached of which prompt; here it knows of none."""
    urls = [f"http://h:{port}" for port in range(1, servers + 1)]
    config = Config.model_validate({"pools": {"m": {"backends": urls, "prefix": prefix}}})
    table = PoolTable(clock)
    table.apply(config.pools, config.health)
    now, hits = clock.now(), 0.0
    for number in range(40):
        sample = LoadSample(now, 0, 0, 0.1, 100_000, prefix_hits=hits)
        table.observe("m/b1", Scraped(sample))
        cached_tokens = 7_500 if number >= 5 else 0
        hits += cached_tokens
        slot = table.take("m/b1", now, Need(8_000, 64, streams=True))
        table.first_token(slot, now + (8_000 - cached_tokens) / 10_000)
        slot.release()
        now += 1.0
    assert table.get("m/b1").limit.reading.rate.at(now) == pytest.approx(per_s, rel=0.1)


def test_without_metrics_what_was_read_counts_at_once(clock):
    config = Config.model_validate({"pools": {"m": {"backends": ["http://h:1"]}}})
    table = PoolTable(clock)
    table.apply(config.pools, config.health)
    now, rate = clock.now(), table.get("m/b1").limit.reading.rate
    table.observe("m/b1", Scraped(LoadSample(now, 0, 0, 0.1, 100_000)))
    table.first_token(table.take("m/b1", now, Need(8_000, 64, streams=True)), now + 0.8)
    assert rate.at(now + 0.8) is None
    table.observe("m/b1", ScrapeFailed(now + 60.0))
    assert rate.at(now + 60.0) == pytest.approx(10_000, rel=0.1)


def test_what_an_engine_wrote_is_shared_by_all_that_were_there_between_two_scrapes(table):
    table.observe("m/b1", Scraped(LoadSample(100.0, 0, 0, 0.1)))
    for slot in [table.take("m/b1", 100.2, Need(10, 10)) for _ in range(4)]:
        slot.release()
    table.observe("m/b1", Scraped(LoadSample(101.0, 0, 0, 0.1, generation_tokens=40.0)))
    assert table.get("m/b1").pulse.each_wrote_tokens == 10.0


def test_several_sequences_of_one_request_share_what_an_engine_wrote(table):
    table.observe("m/b1", Scraped(LoadSample(100.0, 0, 0, 0.1)))
    table.take("m/b1", 100.2, Need(10, 10, sequences=4)).release()
    table.observe("m/b1", Scraped(LoadSample(101.0, 0, 0, 0.1, generation_tokens=40.0)))
    assert table.get("m/b1").pulse.each_wrote_tokens == 10.0


def test_a_failed_scrape_does_not_hide_who_shared_what_an_engine_wrote(table):
    table.observe("m/b1", Scraped(LoadSample(100.0, 0, 0, 0.1)))
    for slot in [table.take("m/b1", 100.2, Need(10, 10)) for _ in range(4)]:
        slot.release()
    table.observe("m/b1", ScrapeFailed(101.0))
    table.observe("m/b1", Scraped(LoadSample(102.0, 0, 0, 0.1, generation_tokens=40.0)))
    assert table.get("m/b1").pulse.each_wrote_tokens == 10.0


# --- one server and the next of its name --------------------------------------------------------


def stream_of(backend_id="m/b1", *, sent_at, ended_at, gap_s):
    return RequestRecord(
        "r", Endpoint.CHAT, sent_at, stream=True, backend_id=backend_id, sent_at=sent_at,
        first_byte_at=ended_at - 100 * gap_s, ended_at=ended_at, outcome=Outcome.OK,
        usage=Usage(10, 101, UsageSource.UPSTREAM),
    )  # fmt: skip


def test_what_ended_at_the_server_before_says_nothing_of_the_next_of_its_name(table, clock):
    table.apply(pools(m=[{"name": "b1", "url": ONE}]))
    clock.at = 110.0
    table.apply(pools(m=[{"name": "b1", "url": TWO}]))
    moved = table.get("m/b1")
    table.ended([stream_of(sent_at=105.0, ended_at=112.0, gap_s=0.01)])
    assert moved.room.writing.gap_s is None
    table.ended([stream_of(sent_at=111.0, ended_at=122.0, gap_s=0.1)])
    assert moved.room.writing.gap_s == pytest.approx(0.1)


def test_a_process_that_took_the_place_of_another_is_judged_by_its_own_pace(table):
    table.ended([stream_of(sent_at=100.0, ended_at=102.0, gap_s=0.01)])
    backend = table.get("m/b1")
    assert backend.limit.decode.at(102.0) == pytest.approx(100.0)
    table.observe("m/b1", Scraped(LoadSample(103.0, 1, 0, 0.1, progress=1000.0)))
    table.observe("m/b1", Scraped(LoadSample(104.0, 0, 0, 0.0, progress=0.0)))
    assert backend.limit.decode.at(104.0) is None


@pytest.mark.parametrize("before", [[TrafficFailed(100.0, Ending.CONNECT)] * 5, [ProbeFailed(100.0, "http_503")]])  # fmt: skip
def test_a_server_that_refuses_after_other_trouble_has_lost_its_cache(table, before):
    backend = make_ready(table)
    backend.sessions.last[1] = object()
    for each in before:
        table.observe("m/b1", each)
    assert backend.phase is Phase.DOWN
    assert len(backend.sessions) == 1
    table.observe("m/b1", ProbeFailed(101.0, "refused"))
    assert (backend.reason, len(backend.sessions)) == ("refused", 0)


def test_a_backend_that_is_added_first_learns_from_the_others_of_its_pool(table, clock):
    table.listen([], clock.at)
    known = table.get("m/b1").uses
    table.apply(pools(m=["http://127.0.0.1:9009", ONE, TWO]))
    table.listen([], clock.at)
    assert [each.uses is known for each in table.backends("m")] == [True] * 3


def test_a_reload_leaves_a_window_as_narrow_as_it_will_be(table):
    backend = make_ready(table, models=(BASE, LORA))
    table.narrow("m/b1", 2048)
    table.apply(pools(m=[ONE, TWO]))
    assert table.get("m/b1") is backend
    assert backend.window_tokens == 2048
    assert backend.models["lora-a"].window_tokens is None
    make_ready(table)
    assert backend.window_tokens == 4096


# --- while this process stood still -------------------------------------------------------------


def test_the_time_in_which_this_process_stood_still_is_not_held_against_metrics(table):
    backend = make_ready(table)
    scrape(table)
    table.forgive(160.0)
    table.observe("m/b1", ProbePassed(160.1))
    assert backend.phase is Phase.READY
    table.observe("m/b1", ProbePassed(175.0))
    assert (backend.phase, backend.reason) == (Phase.DEGRADED, "metrics_stale")


def test_metrics_that_were_lost_before_are_lost_still(table):
    backend = make_ready(table)
    scrape(table)
    table.observe("m/b1", ProbePassed(115.0))
    assert (backend.phase, backend.reason) == (Phase.DEGRADED, "metrics_stale")
    for at in (116.0, 124.0):
        table.forgive(at, backend)
        table.observe("m/b1", ProbePassed(at + 0.1))
        assert (backend.phase, backend.reason) == (Phase.DEGRADED, "metrics_stale")


def test_an_engine_that_stood_still_with_this_process_is_not_stuck(table):
    backend = make_ready(table)
    scrape(table)
    table.forgive(160.0)
    scrape(table, at=160.1)
    assert backend.phase is Phase.READY
    scrape(table, at=195.0)
    assert (backend.phase, backend.reason) == (Phase.DOWN, "no_progress")


# --- engines without metrics --------------------------------------------------------------------


def whole_reply(*, sent_at, ended_at, tokens):
    return RequestRecord(
        "r", Endpoint.CHAT, sent_at, backend_id="m/b1", sent_at=sent_at, ended_at=ended_at,
        outcome=Outcome.OK, usage=Usage(10, tokens, UsageSource.UPSTREAM),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("took_s", "tokens", "endpoint", "grows"),
    [
        ((8.0,), 100, Endpoint.CHAT, True),  # within the objectives
        ((40.0,), 100, Endpoint.CHAT, True),  # a slow server, which gets no slower
        ((6.0, 7.0), 0, Endpoint.TRANSCRIPTIONS, True),  # nobody tells the tokens
        ((2.0, 60.0), 10, Endpoint.CHAT, True),  # some wait
        ((0.01,), 0, Endpoint.TOKENIZE, False),  # no engine works on it
    ],
)
def test_without_metrics_whole_replies_that_came_soon_let_the_limit_grow(
    table, took_s, tokens, endpoint, grows
):
    limit = make_ready(table).limit
    table.observe("m/b1", ScrapeFailed(200.0))
    low = limit.value
    slots = [table.take("m/b1", 200.0) for _ in range(low)]
    for second in range(1, 20):
        at = 200.0 + second
        for each_s in took_s:
            reply = whole_reply(sent_at=at - each_s, ended_at=at, tokens=tokens)
            reply.endpoint = endpoint
            table.ended([reply] * 10)
        table.observe("m/b1", ScrapeFailed(at))
    assert (limit.value > low) is grows
    assert limit.value >= low
    assert slots


def test_without_metrics_replies_that_became_slow_raise_no_limit(table):
    limit = make_ready(table).limit
    table.observe("m/b1", ScrapeFailed(200.0))
    table.ended([whole_reply(sent_at=195.0, ended_at=200.0, tokens=10)])
    low = limit.value
    slots = [table.take("m/b1", 200.0) for _ in range(low)]
    for second in range(1, 20):
        at = 200.0 + second
        table.ended([whole_reply(sent_at=at - 30.0, ended_at=at, tokens=10)] * 10)
        failed = whole_reply(sent_at=at - 1.0, ended_at=at, tokens=10)
        failed.outcome = Outcome.BACKEND_ERROR
        table.ended([failed] * 10)
        table.observe("m/b1", ScrapeFailed(at))
    assert limit.value == low
    assert slots
