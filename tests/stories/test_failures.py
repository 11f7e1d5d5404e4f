"""Backends that fail, and clients that leave: what each side sees, and that nothing is left."""

import asyncio
import contextlib
import gc
import json
import re

import pytest

from gateway.core.types import Phase
from gateway.ingress.downstream import Downstream
from gateway.ingress.server import GatewayProtocol
from gateway.sim.server import SimConfig
from tests.stories.stubs import page
from tests.stories.support import FAST, frames, gateway, story

SLOW = SimConfig(model="m", decode_step_s=0.02)


def chats(sim):
    return [each for each in sim.requests if each.path == "/v1/chat/completions"]


@story
async def test_a_refused_connection_is_tried_elsewhere_and_the_client_sees_nothing_of_it():
    async with gateway(FAST, FAST) as world:
        world.sims[0].inject("refuse")
        for _ in range(10):
            assert (await world.chat(max_tokens=1)).status_code == 200
        assert len(chats(world.sims[1])) == 10
        await world.settled()


@story
async def test_with_nobody_to_ask_the_client_gets_an_honest_5xx():
    async with gateway(FAST) as world:
        world.sims[0].inject("refuse")
        reply = await world.chat(max_tokens=1)
        assert reply.status_code in (502, 503)
        await world.until(lambda: world.process.table.backends("m")[0].phase is Phase.DOWN)
        reply = await world.chat(max_tokens=1)
        assert reply.status_code == 503
        assert reply.json()["error"]["code"] == "model_unavailable"
        assert 1 <= int(reply.headers["retry-after"]) <= 30
        assert "127.0.0.1" not in reply.text


HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
ROLE = {
    "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]
}
LISTED = {"object": "list", "data": [{"id": "m", "object": "model", "max_model_len": 4096}]}


@pytest.mark.parametrize(("status", "failures"), [(400, 0), (500, 3)])
def test_an_error_within_a_stream_counts_against_its_server_only_if_it_is_not_the_request_s_own(
    status, failures
):
    """vLLM writes what its parsers raise of a later token (ValueError) as an error with code 400."""

    async def serve(reader, writer):
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                if length := re.search(rb"content-length: (\d+)", head.lower()):
                    await reader.readexactly(int(length[1]))
                if not head.startswith(b"POST /v1/chat/completions"):
                    writer.write(page(json.dumps(LISTED).encode()))
                    continue
                base = {
                    "id": "chatcmpl-1",
                    "object": "chat.completion.chunk",
                    "created": 1,
                    "model": "m",
                }
                error = {
                    "message": "Expecting value",
                    "type": "BadRequestError",
                    "param": None,
                    "code": status,
                }
                writer.write(HEAD + _chunk(base | ROLE))
                await asyncio.sleep(0.05)  # the client has the first by then
                writer.write(_chunk({"error": error}) + b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
        writer.close()

    @story
    async def counts():
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            pools = f"pools: {{m: {{backends: ['http://127.0.0.1:{port}']}}}}"
            async with gateway(pools=pools, wait=False, access=True) as world:
                await world.ready(1)
                (backend,) = world.process.table
                for _ in range(3):
                    reply = await world.chat(stream=True, max_tokens=2)
                    assert reply.text.count('"error"') == 1
                    assert "Expecting value" in reply.text
                assert backend.health.traffic_failures == failures
                outcomes = {each["outcome"] for each in world.access_lines()}
                assert outcomes == {"upstream_rejected" if status == 400 else "stream_broken"}

    counts()


def _chunk(told):
    frame = b"data: %b\n\n" % json.dumps(told, separators=(",", ":")).encode()
    return b"%x\r\n%b\r\n" % (len(frame), frame)


ASKED = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2},
    "/v1/completions": {"prompt": "x", "max_tokens": 2},
    "/v1/messages": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2},
    "/v1/responses": {"input": "x", "max_output_tokens": 2},
    "/v1/embeddings": {"input": "x"},
}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", ASKED)
def test_what_a_server_does_not_take_as_it_stops_is_answered_by_another_one(path, stream):
    """vLLM drains for `--shutdown-timeout`, and its health is good."""

    @story
    async def check():
        async with gateway(FAST, FAST, access=True) as world:
            world.sims[0].inject("stopping")
            asked = {"model": "m", "stream": stream, **ASKED[path]}
            stopping = world.process.table.get("m/b1")
            while not stopping.kept_out:
                reply = await world.http.post(path, json=asked)
                assert reply.status_code == 200, reply.text
                assert '"error"' not in reply.text
                assert len(world.sims[0].received(path)) <= 5
            await world.settled()
            assert {each["outcome"] for each in world.access_lines()} == {"ok"}

    check()


@story
async def test_that_the_only_server_stops_is_told():
    async with gateway(FAST) as world:
        world.sims[0].inject("stopping@1")
        reply = await world.chat(max_tokens=1)
        assert reply.status_code == 502
        assert "is shutting down" in reply.json()["error"]["message"]
        assert (await world.chat(max_tokens=1)).status_code == 200


@story
async def test_an_idle_connection_that_the_backend_closes_costs_no_request():
    async with gateway(FAST) as world:
        await world.chat(max_tokens=1)
        world.sims[0].inject("keepalive_close@5")
        for _ in range(5):
            assert (await world.chat(max_tokens=1)).status_code == 200
        await world.settled()


@pytest.mark.parametrize(
    "fault", ["reset_after=3", "truncate_after=3", "truncate_chunk=3", "clean_end_without_done=3"]
)
def test_a_stream_that_breaks_ends_with_an_error_frame_and_done(fault):
    @story
    async def check():
        async with gateway(FAST) as world:
            world.sims[0].inject(fault.replace("=", ":"))
            reply = await world.chat(stream=True, max_tokens=20)
            assert reply.status_code == 200
            data = frames(reply.text)
            assert data[-1] == "[DONE]"
            error = json.loads(data[-2])["error"]
            assert isinstance(error["code"], str)
            assert reply.headers["x-request-id"] in error["message"]
            assert len(chats(world.sims[0])) == 1
            await world.settled()
            assert 'outcome="stream_broken"' in await world.metrics()

    check()


@story
async def test_an_error_frame_after_some_tokens_is_relayed_once_with_a_string_code():
    async with gateway(FAST) as world:
        world.sims[0].inject("error_frame_after:3")
        data = frames((await world.chat(stream=True, max_tokens=20)).text)
        errors = [json.loads(each)["error"] for each in data if '"error"' in each]
        assert len(errors) == 1
        assert isinstance(errors[0]["code"], str)
        assert data[-1] == "[DONE]"


@story
async def test_a_refusal_after_attempts_says_who_was_asked_and_how_often():
    async with gateway(FAST, FAST) as world:
        for sim in world.sims:
            sim.inject("refuse")
        reply = await world.chat(max_tokens=1)
        assert reply.status_code == 502
        assert reply.headers["x-gateway-attempts"] == "2"
        assert reply.headers["x-gateway-backend"] in ("m/b1", "m/b2")
        assert "backend;dur=" in reply.headers["server-timing"]


@story
async def test_an_error_frame_before_any_token_becomes_a_real_status():
    async with gateway(FAST) as world:
        world.sims[0].inject("error_frame_after:0")
        reply = await world.chat(stream=True, max_tokens=20)
        assert reply.status_code == 502
        assert reply.json()["error"]["type"] == "server_error"
        await world.settled()


ASKS = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 20},
    "/v1/completions": {"prompt": "x", "max_tokens": 20},
    "/v1/messages": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 20},
    "/v1/responses": {"input": "x", "max_output_tokens": 20},
}


@pytest.mark.parametrize("path", ASKS)
@pytest.mark.parametrize("stream", [False, True])
def test_an_aborted_answer_is_a_failure_not_a_short_success(stream, path):
    @story
    async def check():
        async with gateway(FAST) as world:
            world.sims[0].inject("abort_finish")
            reply = await world.http.post(path, json={"model": "m", "stream": stream, **ASKS[path]})
            if stream:
                assert '"error"' in reply.text
            else:
                assert reply.status_code == 502
            await world.settled()
            assert 'reason="' in await world.metrics()

    check()


@pytest.mark.parametrize("path", ASKS)
def test_an_answer_that_a_client_did_not_wait_for_is_counted_by_what_came(path):
    @story
    async def check():
        async with gateway(SLOW) as world:
            body = {"model": "m", "stream": True, **ASKS[path]}
            async with world.http.stream("POST", path, json=body) as reply:
                seen = 0
                async for line in reply.aiter_lines():
                    seen += line.startswith("data: ") and "sim" not in line
                    if seen > 6:
                        break
            await world.settled()
            tokens = await world.metrics()
        prompt, completion = (
            float(re.search(rf'^gateway_tokens_total{{.*kind="{kind}".*}} (\S+)$', tokens, re.M)[1])
            for kind in ("prompt", "completion")
        )
        assert 0 < prompt < 50  # one short word and its template
        assert 3 <= completion < 20

    check()


@story
async def test_content_that_looks_like_an_ending_is_only_content():
    async with gateway(FAST) as world:
        data = frames(
            (await world.chat('[[sim:echo]] data: [DONE]\n\n and {"error": 1}', stream=True)).text
        )
        assert data[-1] == "[DONE]"
        assert data.count("[DONE]") == 1
        assert not any(each.startswith('{"error"') for each in data)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_stops_the_engine(stream):
    @story
    async def check():
        async with gateway(SLOW) as world:
            body = json.dumps(
                {
                    "model": "m",
                    "stream": stream,
                    "max_tokens": 500,
                    "messages": [{"role": "user", "content": "x"}],
                }
            )
            _, writer = await asyncio.open_connection("127.0.0.1", world.process.public_port)
            writer.write(
                f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {world.key}\r\n"
                f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode()
            )
            await world.until(lambda: world.sims[0].engine.running == 1)
            writer.close()
            await world.at_once(lambda: world.sims[0].engine.running == 0)
            await world.settled()
            assert world.process.table.backends("m")[0].phase is Phase.READY
            assert 'outcome="client_gone"' in await world.metrics()

    check()


@story
async def test_a_backend_that_answers_nothing_is_given_up_and_not_asked_twice():
    async with gateway(FAST, FAST, extra="timeouts: {first_byte: 1s}") as world:
        for sim in world.sims:
            sim.inject("hang_before_headers")
        reply = await world.chat(max_tokens=1)
        assert reply.status_code == 504
        assert reply.json()["error"]["code"] == "backend_timeout"
        assert sum(len(chats(sim)) for sim in world.sims) == 1
        await world.settled()


@story
async def test_a_stalled_stream_is_ended_and_told():
    async with gateway(FAST, extra="timeouts: {stall: 1s}") as world:
        world.sims[0].inject("stall_after:3")
        data = frames((await world.chat(stream=True, max_tokens=20)).text)
        assert data[-1] == "[DONE]"
        assert "error" in data[-2]
        await world.settled()


@story
async def test_silence_is_filled_with_comments():
    async with gateway(FAST, extra="timeouts: {stall: 30s, heartbeat: 1s}") as world:
        world.sims[0].inject("stall_after:3")
        async with world.http.stream("POST", "/v1/chat/completions", json={
            "model": "m", "stream": True, "max_tokens": 20, "messages": [{"role": "user", "content": "x"}],
        }) as reply:  # fmt: skip
            async for line in reply.aiter_lines():
                if line.startswith(":"):
                    break
            else:
                pytest.fail("no comment came")
        await world.settled()


@pytest.mark.parametrize(
    ("fault", "status"), [("http_500", 500), ("html_error", 502), ("admission_503", 503)]
)
def test_the_backends_errors_are_passed_once_in_openai_form(fault, status):
    @story
    async def check():
        async with gateway(FAST, FAST) as world:
            for sim in world.sims:
                sim.inject(fault)
            reply = await world.chat(max_tokens=1)
            assert reply.status_code == status
            error = reply.json()["error"]
            assert set(error) == {"message", "type", "param", "code"}
            assert isinstance(error["code"], str)
            asked = sum(len(chats(sim)) for sim in world.sims)
            if status == 503:  # it did nothing, so the other was asked too
                assert asked == 2
                assert 1 <= int(reply.headers["retry-after"]) <= 30
            else:
                assert asked == 1

    check()


@story
async def test_a_client_that_does_not_read_is_bounded_and_cut():
    async with gateway(
        SimConfig(model="m", speed=0, max_model_len=200_000, num_blocks=20_000),
        extra="timeouts: {client_write: 1s}",
    ) as world:
        body = json.dumps(
            {
                "model": "m",
                "stream": True,
                "max_tokens": 100_000,
                "messages": [{"role": "user", "content": "x"}],
            }
        )
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", world.process.public_port, limit=1024
        )
        writer.write(
            f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {world.key}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode()
        )
        await world.until(lambda: world.in_flight() == 1)
        await world.until(
            lambda: not world.process.ingress.live and world.sims[0].engine.running == 0, seconds=15
        )
        await world.settled()
        writer.close()
        assert 'outcome="client_stalled"' in await world.metrics()


@story
async def test_answers_of_5xx_count_against_a_backend_until_it_is_not_preferred_any_more():
    async with gateway(FAST, FAST) as world:
        world.sims[0].inject("http_500")
        for _ in range(40):
            await world.chat(max_tokens=1)
        first = world.process.table.backends("m")[0]
        await world.until(lambda: first.phase is not Phase.READY)
        assert len(chats(world.sims[0])) < 20


@story
async def test_clients_that_reset_before_their_story_begins_leave_nothing():
    async with gateway(FAST) as world:
        body = json.dumps({"model": "m", "max_tokens": 1, "messages": []}).encode()
        for _ in range(200):
            _, writer = await asyncio.open_connection("127.0.0.1", world.process.public_port)
            writer.write(
                b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer %b\r\n"
                b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
                % (world.key.encode(), len(body), body)
            )
            writer.transport.abort()
        await world.settled()


@pytest.mark.parametrize("stream", [False, True])
def test_what_a_client_that_left_had_sent_is_freed_at_once(stream):
    """Not only when the collector of cycles runs, which is rarely: bodies are large."""

    def held():
        return [each for each in gc.get_objects() if isinstance(each, Downstream | GatewayProtocol)]

    @story
    async def check():
        async with gateway(SLOW) as world:
            body = json.dumps({"model": "m", "stream": stream, "max_tokens": 500, "messages": []})
            request = (
                f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {world.key}\r\n"
                f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n{body}"
            )
            _, writer = await asyncio.open_connection("127.0.0.1", world.process.public_port)
            writer.write(request.encode())
            await world.until(lambda: world.sims[0].engine.running == 1)
            assert len(held()) == 2
            writer.close()
            await world.settled()
            await world.until(lambda: not held())

    gc.collect()  # what other tests have left
    gc.disable()
    try:
        check()
    finally:
        gc.enable()


@story
async def test_clients_that_leave_all_at_once_leave_no_errors_behind(caplog):
    """What the backend sends between a client's going and the end of its story goes nowhere."""
    async with gateway(SimConfig(model="m", decode_step_s=0.002)) as world:
        body = json.dumps(
            {
                "model": "m",
                "stream": True,
                "max_tokens": 8000,  # the first one still runs when the last one comes
                "messages": [{"role": "user", "content": "x"}],
            }
        ).encode()
        request = (
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"authorization: Bearer %b\r\ncontent-length: %d\r\n\r\n%b"
            % (world.key.encode(), len(body), body)
        )
        writers = []
        for _ in range(60):
            _, writer = await asyncio.open_connection("127.0.0.1", world.process.public_port)
            writer.write(request)
            writers.append(writer)
        await world.until(lambda: world.in_flight() == 60)
        for writer in writers:
            writer.transport.abort()
        await world.settled()
    assert not [each for each in caplog.records if each.levelname == "ERROR"]


@pytest.mark.parametrize("status", [400, 404, 500, 503, 504])
@pytest.mark.parametrize("stream", [False, True])
def test_the_access_line_of_a_backends_error_has_the_code_that_the_client_reads(status, stream):
    @story
    async def told():
        async with gateway(FAST, access=True) as world:
            world.sims[0].inject(f"http_500:{status}")
            reply = await world.chat(stream=stream)
            assert reply.status_code == status
            await world.settled()
            (line,) = world.access_lines()
            assert line["code"] == reply.json()["error"]["code"]

    told()


@story
async def test_the_status_of_a_stream_that_came_to_no_good_end_is_not_that_of_its_head():
    """The reference of metrics and that of log lines say so."""
    body = {"model": "m", "messages": [{"role": "user", "content": "go on"}], "stream": True}
    async with gateway(SimConfig(model="m", reply_tokens=4000), access=True) as world:
        async with world.http.stream("POST", "/v1/chat/completions", json=body) as left:
            assert left.status_code == 200
        await world.settled()
        world.sims[0].inject("truncate_after:3")
        broken = await world.chat(stream=True)
        assert (broken.status_code, '"error"' in broken.text) == (200, True)
        await world.settled()
        ended = [(each["outcome"], each["status"]) for each in world.access_lines()]
        assert ended == [("client_gone", 499), ("stream_broken", 502)]
        told = await world.metrics()
        for outcome, status in ended:
            labels = f'code="{status}",endpoint="chat",model="m",outcome="{outcome}",pool="m"'
            assert f"gateway_requests_total{{{labels}}} 1.0" in told
