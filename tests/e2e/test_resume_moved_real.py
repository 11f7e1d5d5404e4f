"""Streams leave a real vLLM that is drained; whole replies outlive one that is killed, or that lost them."""

import asyncio
import signal

import httpx2
import pytest

from tests.e2e.resuming import (
    Told,
    access_lines,
    behind_a_gateway,
    chat,
    check_ends,
    check_greedy,
    client,
    disturbed,
    in_flight,
    lora_flags,
    resumed,
    stayed,
    undisturbed,
    unresumed,
)
from tests.e2e.support import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

TOKENS = 150
HELD_AFTER = 12  # frames
ASKED = 24
CHATS = "/v1/chat/completions"


@pytest.fixture
def servers(shared_engines):
    return shared_engines.serving(2, *lora_flags())


def requests():
    return {
        number: chat(f"tell {number}", TOKENS, temperature=0 if number % 2 else 0.8)
        for number in range(ASKED)
    }


def test_streams_leave_a_server_that_is_drained(tmp_path, servers):
    """What it carries cannot end there: the valve holds it."""
    expected = asyncio.run(undisturbed(servers[1], requests()))
    moves = {"tiny": {"move_after": "0s"}}
    with behind_a_gateway(tmp_path, servers, stall="30s", **moves) as (gate, first):
        first.hold_after(HELD_AFTER)

        def drain():
            with httpx2.Client(base_url=gate.admin_url, trust_env=False, timeout=60) as admin:
                admin.post("/admin/v1/backends/tiny/b1:drain", json={}).raise_for_status()

        answers = asyncio.run(disturbed(gate, first, requests(), drain))
        assert first.streams_held >= 5
        check_ends(gate, answers)
        check_greedy(answers, expected)
        # One that has come to no seam stays, and the valve lets it come to none: it leaves when its server stalls.
        assert resumed(gate) + unresumed(gate).total() + stayed(gate) >= first.streams_held
        moved = resumed(gate, 'cause="drain"')
        assert moved > 0
        if moved == first.streams_held:
            assert "gateway_upstream_failures_total{" not in gate.metrics()


def test_whole_replies_outlive_their_server(tmp_path, servers):
    """They are streams inside, so what was read of them is not lost."""
    expected = asyncio.run(undisturbed(servers[1], requests()))
    with behind_a_gateway(tmp_path, servers, tiny={"resume_replies": "64"}) as (gate, first):
        first.hold_after(HELD_AFTER)
        replies = asyncio.run(whole(gate, first, lambda: servers[0].signal(signal.SIGKILL)))
        assert first.streams_held >= 5
        assert resumed(gate) > 0
    assert {each.status_code for each in replies.values()} <= {200, 502}
    sound = {number: each for number, each in replies.items() if each.status_code == 200}
    assert {each.headers.get("x-gateway-resumed") for each in sound.values()} == {None, "1"}
    told = {number: as_told(each) for number, each in replies.items()}
    check_greedy(told, expected)
    assert {each.usage["completion_tokens"] for each in told.values() if each.whole} == {TOKENS}


async def whole(gate, first, disturb):
    """Return the replies of requests that are not streamed; `disturb` is called once the first server's are held."""
    async with client(gate) as http, asyncio.TaskGroup() as group:
        tasks = {
            number: group.create_task(http.post(path, json=body | {"stream": False, "stream_options": None}))
            for number, (path, body) in requests().items()
        }  # fmt: skip

        def held() -> bool:
            """Whether all were sent, and the first server's are all held: one that has not begun could not go on."""
            ended = sum(task.done() for task in tasks.values())
            at_first, *others = in_flight(gate)
            return at_first == first.streams_held >= 5 and at_first + sum(others) + ended >= ASKED

        await asyncio.to_thread(wait_until, held, 120, "the first server's are held")
        disturb()
    return {number: task.result() for number, task in tasks.items()}


def as_told(reply):
    """Return a whole reply as a stream would have told it."""
    if reply.status_code != 200:
        return Told(error=reply.text)
    body = reply.json()
    (choice,) = body["choices"]
    return Told(choice["message"]["content"], body["usage"], choice["finish_reason"], done=True)


def test_a_request_that_its_server_lost_is_answered_by_another_one(tmp_path, servers):
    """Its metrics show what all others get there meanwhile."""

    def ask(http, number, tokens):
        _, body = requests()[number]
        greedy = {"stream": False, "stream_options": None, "temperature": 0, "max_tokens": tokens}
        return http.post(CHATS, json=body | greedy)

    async def answers(gate, first):
        asked = []
        async with client(gate) as http, asyncio.timeout(120), asyncio.TaskGroup() as group:
            first.lose_next()
            while not first.lost:
                asked.append(group.create_task(ask(http, len(asked) % ASKED, 5)))
                await asyncio.sleep(0.1)
            asked += [group.create_task(ask(http, number, TOKENS)) for number in range(8)]
        return [each.result() for each in asked]

    def sent_twice():
        return [line for line in access_lines(gate) if line["attempts"] == 2]

    with behind_a_gateway(tmp_path, servers, stall="5s") as (gate, first):
        replies = asyncio.run(answers(gate, first))
        assert {each.status_code for each in replies} == {200}
        assert 'reason="forgotten"} 1' in gate.metrics()
        wait_until(sent_twice, 10, "the access line is written")
        assert [(line["backend"], line["outcome"]) for line in sent_twice()] == [("b2", "ok")]
