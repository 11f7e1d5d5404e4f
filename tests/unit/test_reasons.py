"""Why requests wait, as the admin listener tells it: decisions kept, and dry runs."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time

import msgspec
import pytest
from starlette.testclient import TestClient

from gateway.access.keys import KeyRing, OpenRing
from gateway.admin.api import admin_app
from gateway.admin.audit import Audit
from gateway.admin.desk import Desk as Objects
from gateway.admission.decisions import KEPT
from gateway.admission.gate import Gate
from gateway.config.load import load_config
from gateway.core.errors import GatewayError
from gateway.core.traffic import Queued
from gateway.core.types import (
    Ask,
    Call,
    Caller,
    Demand,
    Dialect,
    Endpoint,
    LoadSample,
    ModelsSeen,
    Need,
    ProbeFailed,
    ProbePassed,
    Route,
    Scraped,
    ServedModel,
)
from gateway.ingress.early import Early
from gateway.ingress.routes import Readiness
from gateway.launch.disk import DiskSpace
from gateway.observe.ended import EndedRequests
from gateway.observe.metrics import Metrics
from gateway.observe.readings import Readings
from gateway.observe.series import Series
from gateway.ops.dryrun import Deciding, DryRun
from gateway.ops.explain import Told
from gateway.ops.requests import Requests
from gateway.ops.upgrading import Upgrades
from gateway.pools.quarantine import Quarantine
from gateway.pools.table import PoolTable
from gateway.routing.catalog import Catalogs
from gateway.routing.choice import Chooser
from gateway.usage.accounts import Accounts
from tests import keyfiles as keys
from tests.orderdesk import adapters, alone, no_limits, orders

YAML = """\
pools:
  m:
    aliases: [gpt]
    backends:
      - url: http://127.0.0.1:8001
        max_in_flight: 2
      - http://127.0.0.1:8002
    queue:
      max_requests: 1
      max_wait: 20s
    kv: {stop_admitting: 0.9, resume: 0.8}
"""
FIRST, SECOND = "m/b1", "m/b2"
NEED = Need(10, 5)


class HeldClock:
    at = 100.0

    def now(self):
        return self.at

    def wall(self):
        return time.time()


class Desk:
    """The admin app over two backends that are ready; no sockets."""

    def __init__(self, folder, text=YAML, ring=None):
        file = folder / "gateway.yaml"
        file.write_text(text)
        self.loaded, self.clock, self.ring = load_config(file), HeldClock(), ring or OpenRing()
        self.table = PoolTable(self.clock)
        self.gate = Gate(self.table, Chooser(self.table), self.clock)
        self.table.apply(self.loaded.config.pools)
        self.gate.configure(self.loaded.config.pools, {0})
        for each in (FIRST, SECOND):
            self.table.observe(each, ModelsSeen(100.0, (ServedModel("m", None, 4096),)))
            self.table.observe(each, ProbePassed(100.0))
        self.draining = False
        ordered = orders(self.table, self.clock, self.loaded.config)
        metrics = Metrics(Readings(), self.clock)
        app = admin_app(
            Objects(
                table=self.table,
                metrics=metrics,
                series=Series(metrics, self.clock),
                disk=DiskSpace(folder),
                accounts=Accounts(self.clock, None, None, 0),
                clock=self.clock,
                loaded=lambda: self.loaded,
                ready=lambda: Readiness(True, (("accepting", not self.draining, ""),)),
                deciding=Deciding(
                    self.gate, Catalogs(self.table, self.clock), lambda: self.ring, no_limits
                ),
                early=Early(lambda record: None, self.clock),
                requests=Requests(EndedRequests(), lambda: ()),
                upgrades=Upgrades(),
                trial=lambda pool: None,
                replicas=alone(self.clock),
                orders=ordered,
                adapters=adapters(self.table, self.clock, self.loaded.config, ordered),
                quarantine=Quarantine(self.table, self.clock),
                audit=Audit(folder),
                reloading=None,
                file=file,
            )
        )
        self.http = TestClient(app, base_url="http://127.0.0.1:9090")

    def get(self, path, **query):
        return self.http.get(f"/admin/v1/{path}", params=query)

    def route(self, **query):
        reply = self.get("route", **{"model": "m", "tokens": "10", **query})
        assert reply.status_code == 200, reply.text
        return reply.json()

    def fill(self, backend_id, count):
        for _ in range(count):
            self.table.take(backend_id, self.clock.at)

    def full(self, backend_id, kv=0.95):
        self.table.observe(backend_id, Scraped(LoadSample(self.clock.at, 3, 0, kv)))

    def down(self, backend_id):
        for _ in range(3):
            self.table.observe(backend_id, ProbeFailed(self.clock.at, "refused"))

    def wait(self, *ids, wait_s=20.0, patience_s=math.inf, need=NEED, look=None):
        """Have requests come to the gate, look at what is told of them (or at `look`), and leave."""

        async def one(request_id):
            await self.gate.wait(
                ask(need),
                deadline=self.clock.at + wait_s,
                gives_up_at=self.clock.at + patience_s,
                body_bytes=1,
                request_id=request_id,
            )

        async def main():
            tasks = [asyncio.get_running_loop().create_task(one(each)) for each in ids]
            await asyncio.sleep(0)
            if look is not None:
                seen = look()
            else:
                seen = [self.get(f"decisions/{each}").json() for each in ids]
            for task in tasks:
                task.cancel()
            for task in tasks:
                with contextlib.suppress(asyncio.CancelledError, GatewayError):
                    await task
            return seen

        return asyncio.run(main())


def ask(need):
    call = Call(Endpoint.CHAT, Dialect.CHAT, "m", False, b"{}")
    return Ask(Route("m", "m", "m"), call, Demand(10, True), Caller("k1", "ci", "acme"), need)


@pytest.fixture
def desk(tmp_path):
    return Desk(tmp_path)


@pytest.fixture
def busy(desk):
    """One backend at its fixed limit, the other with a full KV cache."""
    desk.fill(FIRST, 2)
    desk.full(SECOND)
    return desk


# --- decisions --------------------------------------------------------------------------------------


def test_a_request_that_waits_can_say_why(busy):
    (told,) = busy.wait("r1")
    assert told["state"] == "waiting"
    assert told["sentence"] == (
        "r1 has been waiting 0.0 s for m, of at most 20.0 s. It joined the queue at position 1"
        " (wait unknown)."
    )
    first, second = told["backends"]
    assert (first["id"], first["verdict"], first["expected_s"]) == (FIRST, "at_limit", None)
    assert first["setting"] == {
        "name": "pools.m.backends[0].max_in_flight",
        "value": 2,
        "origin": "gateway.yaml:6",
    }
    assert second["verdict"] == "kv_full"
    assert second["setting"] == {
        "name": "pools.m.kv.stop_admitting",
        "value": 0.9,
        "origin": "gateway.yaml:11",
    }
    assert (told["tenant"], told["key_id"], told["prompt_tokens"]) == ("acme", "k1", 10)
    assert told["setting"] in (first["setting"], second["setting"])


def test_one_that_left_says_so(busy):
    busy.wait("r1")
    told = busy.get("decisions/r1").json()
    assert (told["state"], told["sentence"]) == (
        "left",
        "r1 waited 0.0 s for m; then its client disconnected.",
    )


def test_a_shed_request_names_the_bound_with_its_line(busy):
    _, told = busy.wait("r1", "r2")
    assert told["sentence"] == "r2 for m was refused at once: 503 queue_full."
    assert (told["status"], told["code"]) == (503, "server_is_overloaded")
    assert told["setting"]["name"] == "pools.m.queue.max_requests"
    assert told["setting"]["origin"] == "gateway.yaml:9"
    assert "queue is limited to 1 request" in told["message"]
    assert 1 <= told["retry_after_s"] <= 30


def test_one_that_no_backend_serves_says_so(desk):
    desk.down(FIRST)
    desk.down(SECOND)
    (told,) = desk.wait("r1")
    assert told["shed_reason"] == "no_backend"
    assert [each["verdict"] for each in told["backends"]] == ["not_serving", "not_serving"]
    assert told["setting"] is None


def test_a_client_that_is_less_patient_than_the_pool_is_named_itself(tmp_path):
    desk = Desk(tmp_path, YAML.replace("max_requests: 1", "max_requests: 9"))
    slot = desk.table.take(SECOND, 100.0, Need(10, 0))
    desk.fill(FIRST, 2)
    desk.full(SECOND)

    def ten_seconds_later():
        desk.clock.at = 110.0
        desk.full(SECOND)
        slot.release()
        desk.gate.tick(110.0)  # a token a second

    desk.wait("r0", look=lambda: desk.gate.tick(100.0))
    desk.wait("r0", look=ten_seconds_later)
    desk.full(SECOND)
    *_, told = desk.wait("r1", "r2", patience_s=4.0)
    assert told["shed_reason"] == "too_late"
    assert told["setting"] == {
        "name": "x-stainless-read-timeout",
        "value": "leaves 4s to wait",
        "origin": "sent by the client",
    }


def test_the_newest_decisions_are_listed_in_short(busy):
    busy.wait("r1")
    busy.wait("r2")
    listed = busy.get("decisions").json()
    assert (listed["object"], listed["has_more"]) == ("list", False)
    assert [each["id"] for each in listed["data"]] == ["r2", "r1"]
    assert "backends" not in listed["data"][0]
    one = busy.get("decisions", limit=1).json()
    assert ([each["id"] for each in one["data"]], one["has_more"]) == (["r2"], True)


def test_a_request_that_is_not_kept_is_a_problem_that_says_what_is(desk):
    reply = desk.get("decisions/req_nobody")
    assert reply.status_code == 404
    assert reply.headers["content-type"] == "application/problem+json"
    assert reply.json()["code"] == "decision_not_found"
    assert f"keeps the last {KEPT} requests" in reply.json()["detail"]


@pytest.mark.parametrize("limit", ["-1", "x", "1001", "9" * 5000, "²"])
def test_a_limit_that_cannot_be_read_is_refused(desk, limit):
    reply = desk.get("decisions", limit=limit)
    assert (reply.status_code, reply.json()["code"]) == (400, "bad_parameter")


def test_a_setting_that_a_reload_took_away_is_told_without_its_value(busy, tmp_path):
    busy.wait("r1")
    other = tmp_path / "other.yaml"
    other.write_text("pools: {n: {backends: [http://127.0.0.1:8001]}}\n")
    busy.loaded = load_config(other)
    told = busy.get("decisions/r1").json()
    assert {each["setting"]["value"] for each in told["backends"]} == {None}


def test_answers_have_the_documented_shape(busy):
    busy.wait("r1")
    assert msgspec.json.decode(busy.get("decisions/r1").content, type=Told)["id"] == "r1"
    told = busy.get("route", model="m", tokens=10)
    assert msgspec.json.decode(told.content, type=DryRun)["model"] == "m"
    assert set(told.json()) == set(DryRun.__annotations__)
    assert set(busy.get("decisions/r1").json()) == set(Told.__annotations__)


# --- dry runs ---------------------------------------------------------------------------------------


def test_a_request_with_room_would_be_sent_at_once(desk):
    desk.fill(FIRST, 2)
    told = desk.route(model="gpt", output=50)
    assert (told["verdict"], told["backend"], told["position"]) == ("now", SECOND, None)
    assert told["sentence"] == "It would be sent to m/b2 at once."
    assert (told["pool"], told["prompt_tokens"], told["output_tokens"]) == ("m", 10, 50)
    assert [each["verdict"] for each in told["backends"]] == ["at_limit", "room"]
    assert told["backends"][1]["expected_s"] > 0


def test_a_dry_run_takes_and_queues_nothing(busy):
    busy.down(SECOND)
    for _ in range(3):
        assert busy.route()["verdict"] == "wait"
    assert busy.gate.queues() == {"m": Queued()}
    assert [each.in_flight for each in busy.table] == [2, 0]
    assert list(busy.gate.decisions) == []


def test_a_request_without_room_would_wait(busy):
    told = busy.route()
    assert (told["verdict"], told["position"], told["may_wait_s"]) == ("wait", 1, 20.0)
    assert told["sentence"] == "It would wait at position 1 (wait unknown)."
    assert told["setting"] is not None


def test_a_small_request_may_pass_a_large_one_as_the_dry_run_says(tmp_path):
    desk = Desk(tmp_path, YAML.replace("max_requests: 1", "max_requests: 9"))
    desk.fill(FIRST, 2)
    sample = LoadSample(100.0, 1, 0, 0.5, kv_capacity_tokens=600)  # 240 are free
    desk.table.observe(SECOND, Scraped(sample))
    told = desk.wait("large", need=Need(150, 100), look=lambda: desk.route(output=5))
    assert (told["verdict"], told["position"]) == ("wait", 1)  # it asks for less than the other
    assert told["sentence"].endswith(
        "A backend has room, so it may overtake requests that do not fit."
    )

    async def both():
        tasks = []
        for request_id, need in (("large", Need(150, 100)), ("small", Need(10, 5))):
            waits = desk.gate.wait(ask(need), deadline=120.0, body_bytes=1, request_id=request_id)
            tasks.append(asyncio.get_running_loop().create_task(waits))
        assert (await tasks[1]).backend_id == SECOND
        tasks[0].cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await tasks[0]

    asyncio.run(both())
    assert desk.get("decisions/small").json()["sentence"] == (
        "small waited 0.0 s for m and was sent to m/b2."
    )


def test_a_request_that_finds_the_queue_full_would_be_refused(desk, tmp_path):
    desk = Desk(tmp_path, YAML.replace("max_requests: 1", "max_requests: 0"))
    desk.fill(FIRST, 2)
    desk.full(SECOND)
    told = desk.route()
    assert (told["verdict"], told["shed_reason"], told["status"]) == ("refused", "no_room", 503)
    assert told["setting"]["origin"] == "gateway.yaml:9"
    assert told["sentence"] == "It would be refused at once: 503 no_room."


def test_a_request_that_is_too_long_would_be_refused_by_the_window(desk):
    told = desk.route(tokens=5000)
    assert (told["verdict"], told["status"]) == ("refused", 400)
    assert (told["code"], told["output_tokens"]) == ("context_length_exceeded", None)
    assert told["setting"]["name"] == "pools.m.max_context"
    assert "4096" in told["message"]


def test_while_draining_every_request_would_be_refused(desk):
    desk.draining = True
    told = desk.route()
    assert (told["verdict"], told["code"]) == ("refused", "shutting_down")


@pytest.mark.parametrize(
    ("query", "status", "code"),
    [
        ({"model": "nope"}, 404, "model_not_found"),
        ({"model": ""}, 400, "bad_parameter"),
        ({"key": "aaaaaaaa"}, 404, "key_not_found"),
        ({"key": "é"}, 404, "key_not_found"),
        ({"tokens": "many"}, 400, "bad_parameter"),
        ({"output": "-1"}, 400, "bad_parameter"),
        ({"endpoint": "nope"}, 400, "bad_parameter"),
        ({"stream": "maybe"}, 400, "bad_parameter"),
    ],
)
def test_a_wish_that_cannot_be_met_is_a_problem(desk, query, status, code):
    reply = desk.get("route", **{"model": "m", **query})
    assert (reply.status_code, reply.json()["code"]) == (status, code)


@pytest.mark.parametrize("endpoint", Endpoint)
def test_every_endpoint_can_be_tried(desk, endpoint):
    assert desk.route(endpoint=endpoint.value, stream=1)["verdict"] == "now"


def test_a_dry_run_for_a_key_has_its_rights_and_its_place(tmp_path):
    path = tmp_path / "keys.yaml"
    made = keys.create(
        path, name="ci", models=("m",), tenant="acme", priority=3, max_context_tokens=100
    )
    old = keys.create(path, name="old", expires_in_s=1, wall_now=1.0)
    desk = Desk(tmp_path, ring=KeyRing.load(path))
    told = desk.route(key=made.id)
    assert (told["tenant"], told["key_id"], told["priority"]) == ("acme", made.id, 3)
    assert desk.get("route", model="gpt", key=made.id).status_code == 404
    told = desk.route(key=made.id, tokens=200)
    assert (told["verdict"], told["setting"]["name"]) == ("refused", "keys.file")
    assert desk.get("route", model="m", key=old.id).json()["code"] == "key_not_found"
