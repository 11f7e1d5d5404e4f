"""Requests in quarantine are listed and lifted whichever worker refuses them."""

import pytest

from gateway.admin.requests import answers_to_workers
from gateway.core.types import ProbeFailed
from tests.admindesk import Desk


@pytest.fixture
def desks(tmp_path):
    """Return worker 1, which is asked, and worker 2."""
    made = []
    for number in (1, 2):
        folder = tmp_path / str(number)
        folder.mkdir()
        made.append(Desk(folder, pools={"m": 2}))
    first, other = made
    answers = answers_to_workers(other.objects)

    async def fellows(what, *args):
        return [await answers[what](*args)]

    first.objects.fellows = fellows
    return made


def refused(desk, body):
    """Have a worker refuse a request; return its id."""
    quarantine, now = desk.objects.quarantine, desk.clock.now()
    of = quarantine.fingerprint(body, "t")
    for name in ("m/b1", "m/b2"):
        quarantine.lost(desk.table.get(name), of, now)
        desk.table.observe(name, ProbeFailed(now, "refused", now))
    quarantine.tick()
    assert quarantine.found(of) is not None
    return of.id


def listed(desk):
    return {each["id"] for each in desk.get("/admin/v1/quarantine").json()["data"]}


def lift(desk, name, **more):
    return desk.client.post(f"/admin/v1/quarantine/{name}:lift", json={}, **more)


def test_those_of_all_workers_are_listed_and_lifted(desks):
    here, there = (refused(desk, b"x") for desk in desks)
    assert listed(desks[0]) == {here, there}
    for name in (there, here):
        assert lift(desks[0], name, params={"dry_run": "true"}).json()["lifted"] is False
        assert name in listed(desks[0])
        reply = lift(desks[0], name, headers={"if-match": "*"})
        assert (reply.status_code, reply.json()) == (200, {"id": name, "lifted": True})
        assert name not in listed(desks[0])
    assert [*desks[1].objects.quarantine] == []


def test_one_that_both_refuse_is_listed_once_and_lifted_by_both(desks):
    names = set()
    for desk in desks:
        desk.objects.quarantine.share(b"key", lambda proven: None)
        names.add(refused(desk, b"x"))
    for suspect, times in zip(
        (s for desk in desks for s in desk.objects.quarantine), (1, 2), strict=True
    ):
        suspect.refused["t"] += times
    (row,) = desks[0].get("/admin/v1/quarantine").json()["data"]
    assert {row["id"]} == names
    assert row["refused"] == {"t": 3}
    assert lift(desks[0], row["id"], headers={"if-match": "*"}).json()["lifted"] is True
    assert [[*desk.objects.quarantine] for desk in desks] == [[], []]


def test_one_that_no_worker_refuses_is_not_found(desks):
    refused(desks[1], b"x")
    for params in ({}, {"dry_run": "true"}):
        reply = lift(desks[0], "nobody", params=params)
        assert (reply.status_code, reply.json()["code"]) == (404, "not_in_quarantine")
