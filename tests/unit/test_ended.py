"""Which requests are kept to be told of, and for how long."""

from gateway.core.asked import Caller
from gateway.core.prefix import Prefix, SentPrompt
from gateway.core.types import Outcome, RequestRecord
from gateway.observe.ended import KEPT, STRANGERS_KEPT, TROUBLED_KEPT, EndedRequests

CALLER = Caller("k1", "name", "acme")


def record(request_id, outcome=Outcome.OK, caller=CALLER, at=0.0, **more):
    return RequestRecord(request_id, None, at, caller=caller, outcome=outcome, **more)


def ids(ended):
    return {each.id for each in ended}


def test_each_kind_has_a_bound_of_its_own():
    ended = EndedRequests()
    ended.posted([record("failed", Outcome.SHED)])
    for number in range(KEPT + 10):
        ended.posted([record(f"w{number}")])
    for number in range(STRANGERS_KEPT + 10):
        ended.posted([record(f"s{number}", Outcome.UNAUTHENTICATED, None)])
    assert len(ended) == KEPT + STRANGERS_KEPT + 1
    assert "failed" in ids(ended)
    assert {"w9", "s9"}.isdisjoint(ids(ended))
    assert {"w10", "s10"} < ids(ended)


def test_failed_requests_are_bounded_too():
    ended = EndedRequests()
    for number in range(TROUBLED_KEPT + 1):
        ended.posted([record(str(number), Outcome.BACKEND_ERROR)])
    assert len(ended) == TROUBLED_KEPT
    assert ended.get("0") is None


def test_of_several_with_one_id_the_newest_counts_and_no_stranger_hides_a_caller():
    ended = EndedRequests()
    ended.posted([record("same", at=1.0), record("same", Outcome.SHED, at=2.0)])
    ended.posted([record("same", Outcome.UNAUTHENTICATED, None, at=3.0)])
    found = ended.get("same")
    assert (found.outcome, found.received_at) == (Outcome.SHED, 2.0)


def test_what_ended_just_now_is_posted_before_anybody_reads():
    ended = EndedRequests(lambda: ended.posted([record("new")]))
    assert ended.get("new").id == "new"


def test_hashes_of_prompts_are_let_go_and_what_they_told_is_kept():
    ended = EndedRequests()
    prefix = Prefix(keys=[1, 2], ends=(10, 5), size=10, prompt_tokens=30, output_tokens=1)
    ended.posted([record("hashed", sent=SentPrompt(prefix, 12, 12, 0))])
    found = ended.get("hashed")
    assert (found.sent, found.expected_cached_tokens) == (None, 12)
