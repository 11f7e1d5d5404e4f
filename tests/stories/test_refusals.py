"""What is refused before anything is forwarded, and how it reads."""

import asyncio
import json

import pytest

from tests.stories.support import FAST, gateway, story


def forwarded(world):
    return [
        each
        for each in world.sims[0].requests
        if each.method == "POST" and each.path.startswith("/v1/")
    ]


def error(reply):
    body = reply.json()["error"]
    assert set(body) == {"message", "type", "param", "code"}
    assert body["code"] is None or isinstance(body["code"], str)
    return body


@story
async def test_keys_are_asked_for_before_the_body_is_read():
    async with gateway(FAST) as world:
        for headers in (
            {"authorization": ""},
            {"authorization": "Bearer gw_wrong"},
            {"authorization": f"Bearer {world.key}x"},
            {"authorization": "Bearer gw_different", "x-api-key": world.key},
        ):
            reply = await world.chat(headers=headers)
            assert reply.status_code == 401, headers
            assert reply.headers["www-authenticate"].startswith("Bearer")
            error(reply)
        reader, writer = await asyncio.open_connection("127.0.0.1", world.process.public_port)
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 60000000\r\n\r\n{"
        )
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 401")
        writer.close()
        assert forwarded(world) == []


@story
async def test_each_credential_header_opens():
    async with gateway(FAST) as world:
        for name, value in (
            ("authorization", f"bearer {world.key}"),
            ("x-api-key", world.key),
            ("api-key", world.key),
        ):
            headers = (
                {"authorization": "", name: value} if name != "authorization" else {name: value}
            )
            request = world.http.build_request("POST", "/v1/chat/completions", headers=headers,
                                               json={"model": "m", "max_tokens": 1, "messages": []})  # fmt: skip
            if name != "authorization":
                del request.headers["authorization"]
            reply = await world.http.send(request)
            assert reply.status_code in (200, 400), name


@story
async def test_unknown_and_forbidden_models_read_the_same():
    async with gateway(
        FAST,
        FAST,
        pools="pools: {m: {backends: [<0>]}, secret: {backends: [<1>], served_model: m}}",
    ) as world:
        from tests import keyfiles as keys

        narrow = keys.create(world.path.parent / "keys.yaml", name="narrow", models=("m",)).key
        from gateway.process import reload

        assert (await reload(world.process)).done
        replies = [
            await world.chat(model=name, headers={"authorization": f"Bearer {narrow}"})
            for name in ("secret", "nothere")
        ]
        texts = []
        for name, reply in zip(("secret", "nothere"), replies, strict=True):
            assert reply.status_code == 404
            assert error(reply)["code"] == "model_not_found"
            texts.append(error(reply)["message"].replace(name, "X"))
        assert texts[0] == texts[1]
        assert (await world.chat(model="secret", max_tokens=1)).status_code == 200


@pytest.mark.parametrize(
    ("path", "method", "status", "code"),
    [
        ("/v1/chat/completions/", "POST", 404, "unknown_url"),
        ("//v1/chat/completions", "POST", 404, "unknown_url"),
        ("/v1/%63hat/completions", "POST", 404, "unknown_url"),
        ("/v1/chat/completions;x", "POST", 404, "unknown_url"),
        ("/v1/../invocations", "POST", 404, "unknown_url"),
        ("/invocations", "POST", 404, "unknown_url"),
        ("/v1/load_lora_adapter", "POST", 404, "unknown_url"),
        ("/pause", "POST", 404, "unknown_url"),
        ("/metrics", "GET", 404, "unknown_url"),
        ("/admin/v1/overview", "GET", 404, "unknown_url"),
        ("/v1/chat/completions", "GET", 405, "method_not_allowed"),
        ("/v1/models", "POST", 405, "method_not_allowed"),
    ],
)
def test_only_the_allow_list_exists(path, method, status, code):
    @story
    async def check():
        async with gateway(FAST) as world:
            before = len(world.sims[0].requests)
            reader, writer = await asyncio.open_connection("127.0.0.1", world.process.public_port)
            writer.write(
                f"{method} {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {world.key}\r\n"
                "connection: close\r\ncontent-length: 2\r\n\r\n{}".encode()
            )
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 %d" % status), head
            assert json.loads(body)["error"]["code"] == code
            asked = {each.path for each in list(world.sims[0].requests)[before:]}
            writer.close()
            assert asked <= {"/health", "/metrics", "/v1/models", "/version", "/openapi.json"}

    check()


@pytest.mark.parametrize(
    ("method", "path", "status", "kind"),
    [
        ("POST", "/v1/messages/batches", 404, "not_found_error"),
        ("GET", "/v1/messages/batches/msgbatch_1", 404, "not_found_error"),
        ("POST", "/v1/v1/messages", 404, "not_found_error"),
        ("GET", "/v1/messages", 405, "invalid_request_error"),
    ],
)
def test_what_is_not_served_of_anthropics_api_is_refused_in_its_form(method, path, status, kind):
    @story
    async def check():
        async with gateway(FAST) as world:
            reply = await world.http.request(method, path)
            told = reply.json()
            assert (reply.status_code, told["type"], told["error"]["type"]) == (
                status,
                "error",
                kind,
            )
            assert reply.headers["request-id"] == told["request_id"]

    check()


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"{not json", None),
        (b"[]", None),
        (b"\xff\xfe{\x00}\x00", None),
        (b'{"model": 5, "messages": []}', "model"),
        (b'{"model": "m", "max_tokens": "many", "messages": []}', "max_tokens"),
        (b'{"model": "m", "stream": "perhaps", "messages": []}', "stream"),
        (
            b'{"model": "m", "messages": [], "kv_transfer_params": {"remote_host": "10.0.0.1"}}',
            "kv_transfer_params",
        ),
        (b'{"model": "m", "messages": [], "chat_template": "{{ 1 }}"}', "chat_template"),
        (b'{"model": "m", "messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "messages"),
    ],
)
def test_a_bad_body_is_refused_with_the_field_that_is_wrong(body, param):
    @story
    async def check():
        async with gateway(FAST) as world:
            reply = await world.http.post(
                "/v1/chat/completions", content=body, headers={"content-type": "application/json"}
            )
            assert reply.status_code == 400
            assert error(reply)["param"] == param
            assert forwarded(world) == []

    check()


@story
async def test_a_body_over_the_limit_is_refused_and_the_client_can_read_why():
    async with gateway(FAST, extra="limits: {max_body: 100KiB}") as world:
        reply = await world.chat("x" * 500_000)
        assert reply.status_code == 413
        assert "102400" in error(reply)["message"]
        assert forwarded(world) == []
        await world.settled()


@pytest.mark.parametrize("expect", [b"", b"expect: 100-continue\r\n"])
def test_a_body_that_announces_more_than_the_limit_is_refused_before_it_is_sent(expect):
    @story
    async def check():
        async with gateway(FAST, extra="limits: {max_body: 100KiB}") as world:
            reader, writer = await asyncio.open_connection("127.0.0.1", world.process.public_port)
            writer.write(
                b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer %b\r\n"
                b"content-type: application/json\r\ncontent-length: 700000000\r\n%b\r\n{"
                % (world.key.encode(), expect)
            )
            async with asyncio.timeout(5):  # the body itself may take 30 s
                head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 413")
            assert b"connection: close" in head
            assert "102400" in json.loads(await reader.read())["error"]["message"]
            writer.close()
            await world.settled()

    check()


@story
async def test_a_body_that_never_comes_is_given_up():
    async with gateway(FAST, extra="timeouts: {body: 300ms, header: 300ms}") as world:
        reader, writer = await asyncio.open_connection("127.0.0.1", world.process.public_port)
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer %b\r\n"
            b"content-type: application/json\r\ncontent-length: 100\r\n\r\n{" % world.key.encode()
        )
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 408")
        assert json.loads(await reader.read())["error"]["code"] == "request_timeout"
        writer.close()
        reader, writer = await asyncio.open_connection("127.0.0.1", world.process.public_port)
        writer.write(b"POST /v1/chat/comp")
        assert (await reader.read()).startswith(b"HTTP/1.1 408")
        writer.close()
        await world.settled()


@pytest.mark.parametrize("head", [b"x-%d: y\r\n" * 1, b"cookie: " + b"z" * 40_000 + b"\r\n"])
def test_a_head_that_is_too_large_is_refused(head):
    @story
    async def check():
        async with gateway(FAST) as world:
            reader, writer = await asyncio.open_connection("127.0.0.1", world.process.public_port)
            lines = (
                b"".join(b"x-%d: y\r\n" % n for n in range(100)) if head.startswith(b"x-") else head
            )
            writer.write(
                b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n"
                + lines
                + b"content-length: 0\r\n\r\n"
            )
            reply = await reader.read()
            assert reply.startswith(b"HTTP/1.1 431")
            assert (
                json.loads(reply.partition(b"\r\n\r\n")[2])["error"]["code"]
                == "request_headers_too_large"
            )
            writer.close()

    check()


@story
async def test_a_compressed_or_form_body_is_refused():
    async with gateway(FAST) as world:
        for headers in (
            {"content-encoding": "gzip", "content-type": "application/json"},
            {"content-type": "text/plain"},
        ):
            reply = await world.http.post("/v1/chat/completions", content=b"{}", headers=headers)
            assert reply.status_code == 415
            error(reply)
        assert forwarded(world) == []


@story
async def test_what_is_not_http_is_refused_in_the_same_form():
    async with gateway(FAST) as world:
        reader, writer = await asyncio.open_connection("127.0.0.1", world.process.public_port)
        writer.write(
            b"GET / HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        reply = await reader.read()
        assert reply.startswith(b"HTTP/1.1 400")
        assert json.loads(reply.partition(b"\r\n\r\n")[2])["error"]["code"] == "invalid_http"
        writer.close()
        assert forwarded(world) == []


@story
async def test_a_prompt_that_does_not_fit_never_reaches_the_backend():
    async with gateway(FAST) as world:
        window = world.process.handler.catalog().entries["m"].route.window_tokens
        reply = await world.chat("word " * (window * 4), max_tokens=10)
        assert reply.status_code == 400
        body = error(reply)
        assert body["code"] == "context_length_exceeded"
        assert f"maximum context length is {window} tokens" in body["message"]
        assert forwarded(world) == []


@pytest.mark.parametrize(
    "sent",
    [
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 500000\r\n\r\n"
        + b"x" * 200_000,
        b"POST /v1/nowhere HTTP/1.1\r\nhost: x\r\ncontent-length: 500000\r\n\r\n" + b"x" * 200_000,
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}GARBAGE\r\n\r\n",
    ],
)
def test_one_request_gets_one_reply(sent):
    @story
    async def check():
        async with gateway(FAST) as world:
            reader, writer = await asyncio.open_connection("127.0.0.1", world.process.public_port)
            writer.write(sent)
            got = b""
            try:
                async with asyncio.timeout(4):
                    got = await reader.readuntil(b"\r\n\r\n")
                    while data := await reader.read(65536):
                        got += data
            except (TimeoutError, ConnectionError):
                pass
            writer.close()
            assert got.count(b"HTTP/1.1 ") == 1, got

    check()
