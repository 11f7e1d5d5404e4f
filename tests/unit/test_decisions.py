"""What is kept of requests at the gate, and which setting is named for each reason."""

from __future__ import annotations

import pytest

from gateway.admission.bounds import Full
from gateway.admission.decisions import BOUNDS, Decisions, State, decide, excluded_by
from gateway.config.explain import section_at
from gateway.config.models import Config
from gateway.core.errors import Overloaded, TooManyWaiting, Unavailable
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
    ShedReason,
)
from gateway.ops.explain import why_it_waited
from gateway.pools.elsewhere import UnderWay
from gateway.pools.table import PoolTable
from gateway.routing.choice import Chooser

NOW, WALL = 100.0, 1_700_000_000.0
SECRET = b"tell nobody of this prompt"


class HeldClock:
    at = NOW

    def now(self):
        return self.at

    def wall(self):
        return WALL


class Fleet:
    """One pool, its table and one request that looks for a backend."""

    def __init__(self, backends=2, **settings):
        urls = [{"url": f"http://127.0.0.1:{8001 + each}"} for each in range(backends)]
        urls[0] |= settings.pop("first", {})
        self.config = Config.model_validate({"pools": {"m": {"backends": urls, **settings}}})
        self.pool = self.config.pools["m"]
        self.table = PoolTable(HeldClock())
        self.table.apply(self.config.pools)
        for each in self.table:
            self.table.observe(each.id, ModelsSeen(NOW, (ServedModel("m", None, 4096),)))
            self.table.observe(each.id, ProbePassed(NOW))

    @property
    def first(self):
        return self.table.get("m/b1")

    def scrape(self, backend_id="m/b1", at=NOW, **told):
        sample = {"at": at, "running": 1, "waiting": 0, "kv_usage_ratio": 0.1, **told}
        self.table.observe(backend_id, Scraped(LoadSample(**sample)))

    def fill(self, count):
        if self.first.limit.fixed is None:
            self.first.limit.value = 32  # as if it had adapted
        for _ in range(count):
            self.table.take("m/b1", NOW)

    def decide(self, request_id="r1", *, wait_s=30.0, asked=None):
        backends = self.table.backends("m")
        choice = Chooser(self.table).explain(asked or ask(), NOW)
        return decide(
            request_id, asked or ask(), backends, choice, pool=self.pool, at=(NOW, WALL), wait_s=wait_s
        )  # fmt: skip

    def named(self, reason, asked=None):
        return excluded_by(reason, self.first, 0, asked or ask(), self.pool, NOW)


def ask(*, adapter=None, priority=0, top=None, need=10):
    call = Call(Endpoint.CHAT, Dialect.CHAT, "m", False, SECRET)
    route = Route("alias", "m", "m", adapter)
    caller = Caller("k1", "ci", "acme", priority)
    return Ask(route, call, Demand(need, True), caller, Need(need, 0), top)


def overloaded(reason):
    return Overloaded("full", reason=reason, retry_after_s=3.0)


# --- what is kept -----------------------------------------------------------------------------------


def test_the_oldest_decision_makes_room_for_the_newest():
    fleet, kept = Fleet(), Decisions(most=3)
    for number in range(5):
        kept.keep(fleet.decide(f"r{number}"))
    assert [each.id for each in kept] == ["r4", "r3", "r2"]
    assert kept.get("r1") is None
    assert kept.get("r2").id == "r2"


def test_an_id_that_comes_again_replaces_the_old_decision():
    fleet, kept = Fleet(), Decisions(most=3)
    for request_id in ("r1", "r2", "r1"):
        latest = fleet.decide(request_id)
        kept.keep(latest)
    assert [each.id for each in kept] == ["r1", "r2"]
    assert kept.get("r1") is latest


def test_a_decision_says_who_asked_for_what_and_what_each_backend_said():
    fleet = Fleet()
    fleet.fill(32)
    seen = fleet.decide()
    assert (seen.model, seen.pool, seen.tenant, seen.key_id) == ("alias", "m", "acme", "k1")
    assert (seen.state, seen.at, seen.wall_at, seen.need.tokens) == (State.WAITING, NOW, WALL, 10)
    first, second = seen.said
    assert (first.exclusion, first.expected_s) == (Exclusion.AT_LIMIT, None)
    assert second.exclusion is None
    assert second.expected_s > 0


def test_a_degraded_backend_is_neither_excluded_nor_scored_while_a_ready_one_has_room():
    fleet = Fleet()
    fleet.first.phase = Phase.DEGRADED
    first, second = fleet.decide().said
    assert (first.exclusion, first.expected_s) == (None, None)
    assert second.expected_s is not None


def test_nothing_of_the_prompt_is_kept():
    told = repr(Fleet().decide())
    assert SECRET.decode() not in told


# --- which setting decided --------------------------------------------------------------------------


@pytest.mark.parametrize("full", Full)
def test_every_bound_of_the_queue_is_a_setting(full):
    decision = Fleet().decide()
    decision.refused(overloaded(ShedReason.QUEUE_FULL), NOW, full)
    assert decision.setting == ("pools", "m", "queue", BOUNDS[full])
    assert decision.setting[-1] in section_at(decision.setting[:-1]).model_fields


NO_SETTING = {
    *(Exclusion.NOT_SERVING, Exclusion.TOO_LARGE, Exclusion.ALREADY_TRIED),
    *(Exclusion.EJECTED, Exclusion.PROBATION),
    Exclusion.WINDOW_TOO_SMALL,  # the server's own: `max_context: auto` did not decide it
}


@pytest.mark.parametrize("reason", Exclusion)
def test_every_exclusion_names_a_setting_that_exists_or_none(reason):
    path = Fleet().named(reason)
    assert (path is None) == (reason in NO_SETTING)
    if path is not None:
        assert path[-1] in section_at(path[:-1]).model_fields


EXCLUDED = {
    Exclusion.AT_LIMIT: ("slo", "ttft"),
    Exclusion.KV_FULL: ("kv", "stop_admitting"),
    Exclusion.NO_KV_ROOM: ("kv", "stop_admitting"),
    Exclusion.ENGINE_QUEUED: ("admission",),
    Exclusion.CLAIMED: ("admission",),
    Exclusion.MODEL_MISSING: ("served_model",),
    Exclusion.ENDPOINT_MISSING: ("endpoints",),
}


@pytest.mark.parametrize("reason", EXCLUDED)
def test_each_exclusion_names_its_setting(reason):
    fleet = Fleet()
    fleet.fill(32)
    assert fleet.named(reason) == ("pools", "m", *EXCLUDED[reason])


def test_an_adapter_that_is_missing_is_a_matter_of_adapters():
    assert Fleet().named(Exclusion.MODEL_MISSING, ask(adapter="sql")) == ("pools", "m", "adapters")


def test_endpoints_of_a_backend_are_named_where_they_are_set():
    fleet = Fleet(first={"endpoints": ["embeddings"]})
    path = fleet.named(Exclusion.ENDPOINT_MISSING)
    assert path == ("pools", "m", "backends", 0, "endpoints")


def test_a_kv_cache_below_the_stop_is_closed_by_the_ratio_of_its_reopening():
    fleet = Fleet()
    fleet.scrape(kv_usage_ratio=0.95)
    assert fleet.named(Exclusion.KV_FULL) == ("pools", "m", "kv", "stop_admitting")
    fleet.scrape(at=NOW + 0.5, kv_usage_ratio=0.85)
    assert fleet.decide().said[0].setting == ("pools", "m", "kv", "resume")


FIXED = ("pools", "m", "backends", 0, "max_in_flight")


def test_a_fixed_limit_is_named_when_it_is_what_holds():
    fleet = Fleet(first={"max_in_flight": 4})
    fleet.fill(4)
    assert fleet.named(Exclusion.AT_LIMIT) == FIXED


def test_a_limit_that_other_gateways_use_up_is_named():
    fleet = Fleet(first={"max_in_flight": 10})
    fleet.table.hear({"m/b1": UnderWay(requests=8)}, 2)
    fleet.fill(5)  # its even part
    assert fleet.named(Exclusion.AT_LIMIT) == FIXED


def test_a_fixed_limit_holds_with_admission_off_too():
    fleet = Fleet(first={"max_in_flight": 4}, admission="off")
    fleet.fill(4)
    assert fleet.decide().said[0][:4] == ("m/b1", Exclusion.AT_LIMIT, None, FIXED)


def test_a_fixed_limit_that_was_cut_is_held_by_the_objective():
    fleet = Fleet(first={"max_in_flight": 4})
    fleet.first.limit.value = 3
    fleet.fill(3)
    assert fleet.named(Exclusion.AT_LIMIT) == ("pools", "m", "slo", "ttft")


def test_a_backend_that_starts_slowly_is_held_by_slow_start():
    fleet = Fleet()
    fleet.first.limit.ready_at = NOW
    fleet.fill(3)
    assert fleet.decide().said[0].setting == ("pools", "m", "slow_start")


def test_the_reserve_for_higher_keys_is_a_matter_of_the_keys():
    fleet = Fleet()
    fleet.fill(30)
    low, high = ask(priority=0, top=9), ask(priority=9, top=9)
    fleet.table.highest_came("m", NOW)
    assert fleet.decide(asked=low).said[0].setting == ("keys", "file")
    assert fleet.decide(asked=high).said[0].exclusion is None


def test_what_waits_while_prompts_are_read_is_held_by_admission():
    assert Fleet().named(Exclusion.READING) == ("pools", "m", "admission")


def test_what_waits_is_held_by_what_holds_most_of_its_backends():
    fleet = Fleet(backends=3)
    fleet.fill(32)
    for each in ("m/b2", "m/b3"):
        fleet.scrape(each, kv_usage_ratio=0.95)
    assert fleet.decide().setting == ("pools", "m", "kv", "stop_admitting")


def test_what_waits_behind_others_while_there_is_room_is_held_by_admission():
    assert Fleet().decide().setting == ("pools", "m", "admission")


def test_what_waits_for_a_backend_to_start_is_held_by_no_setting():
    fleet = Fleet()
    for each in ("m/b1", "m/b2"):
        for _ in range(3):
            fleet.table.observe(each, ProbeFailed(NOW, "refused"))
    decision = fleet.decide()
    assert why_it_waited(decision) == "No backend served it, so it waited for one."
    assert decision.setting is None


def said(*reasons):
    """Return a decision of a request for which backends had these reasons; None has room."""
    decision = Fleet(backends=len(reasons)).decide()
    decision.said = tuple(
        each._replace(exclusion=reason, expected_s=None if reason else 0.1)
        for each, reason in zip(decision.said, reasons, strict=True)
    )
    return decision


@pytest.mark.parametrize(
    ("reasons", "why"),
    [
        ([Exclusion.AT_LIMIT, Exclusion.KV_FULL], "No backend had room, so it waited for one."),
        (
            [Exclusion.AT_LIMIT, Exclusion.ADAPTER_DUE],
            "No backend had room, so it waited for one.",
        ),
        ([Exclusion.AT_LIMIT, None], "Others waited before it, so it waited for its turn."),
        (
            [Exclusion.ADAPTER_LOADING, Exclusion.ADAPTER_DUE, Exclusion.NOT_SERVING],
            "Its adapter was not loaded yet, so it waited for that.",
        ),
        ([Exclusion.NOT_SERVING], "No backend served it, so it waited for one."),
    ],
)
def test_why_a_request_waited_is_told_by_what_was_in_its_way(reasons, why):
    assert why_it_waited(said(*reasons)) == why


@pytest.mark.parametrize("reason", [ShedReason.TOO_LATE, ShedReason.QUEUE_TIMEOUT])
def test_a_deadline_is_the_pools_or_the_clients_own(reason):
    pools, own = Fleet().decide(wait_s=4.0), Fleet().decide(wait_s=4.0)
    own.impatient = True
    for each in (pools, own):
        each.refused(overloaded(reason), NOW)
        assert each.timed_out
    assert pools.setting == ("pools", "m", "queue", "max_wait")
    assert own.setting is None


@pytest.mark.parametrize("reason", ShedReason)
def test_every_reason_to_shed_ends_a_decision(reason):
    decision = Fleet().decide()
    decision.refused(overloaded(reason), NOW + 2)
    assert (decision.state, decision.shed_reason) == (State.REFUSED, reason)
    assert (decision.status, decision.code) == (503, "server_is_overloaded")
    assert (decision.ended_at, decision.retry_after_s) == (NOW + 2, 3.0)


@pytest.mark.parametrize("reason", [ShedReason.ENGINE, ShedReason.DRAINING])
def test_what_an_engine_or_a_shutdown_refuses_keeps_its_wait_and_names_no_setting(reason):
    decision = Fleet(first={"endpoints": ["embeddings"]}).decide()
    decision.admitted("m/b2", NOW + 2)
    decision.refused(overloaded(reason), NOW + 9)
    assert (decision.state, decision.ended_at) == (State.REFUSED, NOW + 2)
    assert (decision.backend_id, decision.setting) == ("m/b2", None)


def test_who_was_let_in_although_it_might_not_wait_was_told_nothing():
    decision = Fleet().decide()
    decision.refused(overloaded(ShedReason.QUEUE_FULL), NOW, Full.REQUESTS)
    decision.admitted("m/b2", NOW)
    assert (decision.state, decision.backend_id) == (State.ADMITTED, "m/b2")
    assert (decision.status, decision.code, decision.message) == (None, None, None)
    assert (decision.shed_reason, decision.retry_after_s) == (None, None)


def test_what_no_backend_serves_names_what_excluded_most_of_them():
    fleet = Fleet(backends=1)
    decision = fleet.decide(asked=ask(adapter="sql"))
    decision.refused(Unavailable("none"), NOW)
    assert decision.setting == ("pools", "m", "adapters")


def test_a_tenants_own_share_is_told_with_its_status():
    decision = Fleet().decide()
    decision.refused(TooManyWaiting("yours"), NOW, Full.TENANT_TOKENS)
    assert (decision.status, decision.setting[-1]) == (429, "tenant_share")
