"""Lists, and what is read of pools and backends."""

import json
from urllib.parse import quote, urlencode

import pytest

from gateway.core.events import EventKind
from gateway.usage.accounts import Accounts
from gateway.usage.entries import Sums
from tests.admindesk import Desk


@pytest.fixture
def desk(tmp_path):
    return Desk(tmp_path, pools={"m": 3, "org/n:x": 1})


def note(desk, number):
    events = desk.orders.supervisor.events
    events.note(desk.clock, EventKind.OPERATOR, "m/b1", "drain", f"event {number}")


def pages(desk, path, limit, most=1000):
    """Return the pages of a list, following `last_id`; `most` pages are read."""
    found, after = [], ""
    for _ in range(most):
        page = desk.get(f"{path}?{urlencode({'limit': limit, 'after': after})}").json()
        found.append(page["data"])
        if not page["has_more"]:
            break
        after = page["last_id"]
    return found


def test_pages_of_a_list_have_every_row_once(desk):
    for number in range(7):
        note(desk, number)
    found = pages(desk, "/admin/v1/events", 3)
    assert [len(page) for page in found] == [3, 3, 1]
    told = [each["detail"] for page in found for each in page]
    assert told == [f"event {number}" for number in range(6, -1, -1)]


def test_a_page_goes_on_behind_its_row_though_others_came(desk):
    for number in range(4):
        note(desk, number)
    first = desk.get("/admin/v1/events?limit=2").json()
    note(desk, 4)
    then = desk.get(f"/admin/v1/events?limit=2&after={first['last_id']}").json()
    assert [each["detail"] for each in then["data"]] == ["event 1", "event 0"]
    assert not then["has_more"]


def test_pages_of_usage_have_every_row_once_whatever_its_names_hold(desk):
    """Names may hold slashes, and an adapter's any text."""
    long = "ö/%" * 80
    names = [("a", "b/c"), ("a/b", "c"), ("a/b", "c%2Fd"), ("a/b", "c/d"), ("m", long), ("m/", "")]
    sums = desk.objects.accounts.sums
    for number, (model, adapter) in enumerate(names, 1):
        sums[desk.objects.accounts.today(), long, long, model, adapter] = Sums(number)
    for limit in (1, 4):
        told = [row for page in pages(desk, "/admin/v1/usage", limit, most=6) for row in page]
        assert [(row["model"], row["adapter"]) for row in told] == sorted(names)


class ReadAccounts(Accounts):
    """Counts how often usage is read."""

    reads = 0

    async def read(self, days):
        self.reads += 1
        return await super().read(days)


def test_a_long_list_of_usage_is_read_and_added_up_once(desk):
    accounts = ReadAccounts(desk.clock, None, None, 0)
    desk.objects.usage.accounts = accounts
    for number in range(2500):
        accounts.sums[accounts.today(), "t", f"k{number}", "m", ""] = Sums(1)
    with desk.client:  # one loop for all requests, as of a gateway
        for _ in range(2):
            found = pages(desk, "/admin/v1/usage", 1000)
            assert len({row["id"] for page in found for row in page}) == 2500
        assert accounts.reads == 2
        path = f"/admin/v1/usage?by=tenant,key&after={found[0][-1]['id']}"
        assert desk.get(path).status_code == 404  # of another list
        assert desk.get("/admin/v1/usage?by=day").json()["data"][0]["requests"] == 2500


def test_a_cursor_that_is_gone_is_refused(desk):
    reply = desk.get("/admin/v1/events?after=999")
    assert (reply.status_code, reply.json()["code"]) == (404, "unknown_cursor")


def test_an_empty_list_has_no_cursor(desk):
    told = desk.get("/admin/v1/events").json()
    assert (told["data"], told["first_id"], told["last_id"]) == ([], None, None)


def test_pools_and_backends_are_told_as_in_the_overview(desk):
    overview = desk.get("/admin/v1/overview").json()
    assert [page for (page,) in pages(desk, "/admin/v1/pools", 1)] == overview["pools"]
    every = [each for pool in overview["pools"] for each in pool["backends"]]
    assert desk.get("/admin/v1/backends").json()["data"] == every
    assert [each["id"] for each in every] == ["m/b1", "m/b2", "m/b3", "org/n:x/b1"]
    for each in every:
        assert desk.get(f"/admin/v1/backends/{each['id']}").json() == each
    for each in overview["pools"]:
        assert desk.get(f"/admin/v1/pools/{each['name']}").json() == each


def test_names_may_be_percent_encoded(desk):
    assert desk.get("/admin/v1/pools/org%2Fn%3Ax").json()["name"] == "org/n:x"
    assert desk.get("/admin/v1/backends/org%2Fn%3Ax%2Fb1").json()["id"] == "org/n:x/b1"


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("pools/nobody", "pool_not_found"),
        ("backends/m/b9", "backend_not_found"),
        ("backends/nobody", "backend_not_found"),
        ("backends/m/b9/logs", "backend_not_found"),
    ],
)
def test_what_is_not_there_is_named(desk, path, code):
    reply = desk.get(f"/admin/v1/{path}")
    assert (reply.status_code, reply.json()["code"]) == (404, code)
    assert "Known" in reply.json()["detail"]


@pytest.mark.parametrize("verb", ["hold", "lift"])
def test_a_pool_that_is_not_there_cannot_be_held(desk, verb):
    reply = desk.client.post(f"/admin/v1/restarts:{verb}", json={"pool": "nope"})
    assert (reply.status_code, reply.json()["code"]) == (404, "pool_not_found")
    assert reply.json()["detail"] == "There is no pool nope. Known pools: m, org/n:x."


def test_a_path_tells_how_it_may_be_asked(desk):
    reply = desk.get("/admin/v1/backends/m/b1:drain")
    assert (reply.status_code, reply.headers["allow"]) == (405, "POST")


def test_one_gateway_alone_shares_with_nobody(desk):
    assert desk.get("/admin/v1/replicas").json()["data"] == []


@pytest.mark.parametrize("verb", ["drain", "undrain"])
def test_a_dry_run_may_be_asked_for_in_the_query(desk, verb):
    told = desk.client.post(f"/admin/v1/backends/m/b1:{verb}?dry_run=true", json={}).json()
    assert (told["dry_run"], told["changed"]) == (True, False)
    assert desk.get("/admin/v1/events").json()["data"] == []


def test_a_dry_run_of_an_adapter_keeps_nothing(desk):
    order = {"adapter": "sql", "path": "/models/sql", "dry_run": True}
    told = desk.client.post("/admin/v1/backends/m/b1/adapters:load", json=order).json()
    assert told["sentence"] == "m/b1 loads sql, until another order comes."
    assert desk.get("/admin/v1/adapters").json()["data"] == []
    assert desk.get("/admin/v1/events").json()["data"] == []


def test_a_dry_run_of_a_hold_holds_nothing(desk):
    for verb in ("hold", "lift"):
        reply = desk.client.post(f"/admin/v1/restarts:{verb}", json={"dry_run": True})
        assert reply.status_code == 200
    assert desk.get("/admin/v1/overview").json()["holds"] == []
    assert desk.get("/admin/v1/events").json()["data"] == []


def test_what_a_change_does_not_know_is_refused(desk):
    for path in ("restarts:hold?dryrun=true", "upgrade?dry_run=true"):
        reply = desk.client.post(f"/admin/v1/{path}", json={})
        assert (reply.status_code, reply.json()["code"]) == (400, "bad_parameter")
    reply = desk.client.post("/admin/v1/restarts:hold", json={"for_s": "1", "x": 1})
    assert {each["pointer"] for each in reply.json()["errors"]} == {"/for_s", "/x"}


@pytest.mark.parametrize(
    ("query", "told"),
    [
        (
            "usage?from=2026-11-01",
            "from is not known here. Known are: limit, after, first, last, by, tenant, key, model.",
        ),
        (f"events?after={'x' * 501}", "after must have at most 500 characters."),
        ("me?verbose=1", "verbose is not known here. Known are: none."),
        ("usage?tenant=a&tenant=b", "The query parameter tenant is given twice."),
    ],
)
def test_a_question_is_refused_rather_than_another_one_answered(desk, query, told):
    reply = desk.get(f"/admin/v1/{query}")
    assert (reply.status_code, reply.json()["code"]) == (400, "bad_parameter")
    assert reply.json()["detail"].endswith(told)


WHOLE = "must be a whole number from {} to {}, written in digits"
MOMENT = "at must be a number from 0 to 9999999999, written in digits, such as 12.5"


@pytest.mark.parametrize("text", ["1_0", "1e1", "+10", " 10", "10.0", "-1", "x", "²", "9" * 6000])
@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("series?minutes=", f"minutes {WHOLE.format(1, 60)}"),
        ("events?limit=", f"limit {WHOLE.format(0, 1000)}"),
        ("route?model=m&tokens=", f"tokens {WHOLE.format(0, 1_000_000_000)}"),
        ("backends/m/b1/logs?bytes=", f"bytes {WHOLE.format(0, 1048576)}"),
    ],
)
def test_a_whole_number_of_a_query_is_digits_in_range(desk, path, text, told):
    reply = desk.get(f"/admin/v1/{path}{quote(text)}")
    assert (reply.status_code, reply.json()["code"]) == (400, "bad_parameter")
    assert reply.json()["detail"] == f"The query parameter is not valid: {told}."


@pytest.mark.parametrize(
    "text", ["1_0", "1e400", "1e3", "nan", "inf", "-1", " 1", "5.", "10000000000"]
)
def test_a_moment_of_a_query_is_digits_in_range(desk, text):
    reply = desk.get(f"/admin/v1/verdict?at={quote(text)}")
    assert (reply.status_code, reply.json()["code"]) == (400, "bad_parameter")
    assert reply.json()["detail"] == f"The query parameter is not valid: {MOMENT}."


@pytest.mark.parametrize(
    "query",
    [
        "verdict?at=1764354000.25",
        "verdict?at=0",
        "series?minutes=1",
        "series?minutes=060",
        "series",
    ],
)
def test_a_number_of_a_query_may_be_any_plain_one_in_range(desk, query):
    assert desk.get(f"/admin/v1/{query}").status_code == 200


def test_probes_and_prometheus_may_add_parameters_of_their_own(desk):
    for path in ("/livez?a=1", "/readyz?a=1&verbose", "/metrics?a=1&a=2"):
        assert desk.get(path).status_code == 200


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("{x}", "it is not JSON (key must be a string at line 1 column 2)"),
        ("[]", "it must be a mapping"),
        ('{"x": 1}', "x is not known here. Known are: reason, dry_run, pool, for_s"),
        ('{"for_s": 0}', "for_s must be more than 0"),
        ('{"for_s": {}}', "for_s must be a number"),
        (json.dumps({"reason": "x" * 2001}), "reason must have at most 2000 characters"),
    ],
)
def test_what_is_wrong_with_a_body_is_told_in_plain_words(desk, body, told):
    headers = {"content-type": "application/json"}
    reply = desk.client.post("/admin/v1/restarts:hold", content=body, headers=headers)
    assert reply.json()["detail"] == f"The body is not valid: {told}."


def test_what_is_wrong_with_a_query_is_told_in_plain_words(desk):
    reply = desk.get("/admin/v1/requests?state=x")
    assert reply.json()["detail"] == (
        "The query parameter is not valid: state must be one of reading, waiting, running, ended."
    )
