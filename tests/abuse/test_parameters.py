"""Bodies of the shapes that advisories are about: refused here, and none of them reaches the engine."""

import json
import time

from tests import keyfiles as keys
from tests.abuse.support import FAST, front_of, gateway, page, scripted, story
from tests.parametercases import BASE, CASES, CHAT, CLIENTS, EMBEDDINGS, HI, image, parts

PADDING = {"role": "user", "content": "x" * 100_000}  # makes a body large: it is read by its skim


def body_of(path, fields):
    return json.dumps({"model": "m", **BASE[path], **fields}, separators=(",", ":")).encode()


def padded(path, fields):
    """The same, in a body that is too large to be decoded at once; None where it has no messages."""
    whole = {**BASE[path], **fields}
    if not isinstance(whole.get("messages"), list):
        return None
    return body_of(path, {**fields, "messages": [*whole["messages"], PADDING]})


def forwarded(world):
    return [each for sim in world.sims for each in sim.requests if each.method == "POST"]


async def post(world, path, body, key=None):
    headers = {"content-type": "application/json"}
    if key is not None:
        headers["authorization"] = f"Bearer {key}"
    return await world.http.post(path, content=body, headers=headers)


@story
async def test_what_a_row_refuses_is_a_400_and_nothing_of_it_reaches_the_engine():
    async with gateway(FAST) as world:
        for name, path, _, wrong, param in CASES:
            for body in (body_of(path, wrong), padded(path, wrong)):
                if body is None:
                    continue
                reply = await post(world, path, body)
                assert reply.status_code == 400, (name, reply.text)
                if path != "/v1/messages":
                    assert reply.json()["error"]["param"] == param, name
        assert forwarded(world) == []
        await world.settled()


@story
async def test_a_key_that_comes_twice_in_a_large_body_is_found_too():
    text = json.dumps(PADDING).encode()
    bodies = [
        b'{"model":"m","messages":[%b],"n":1,"n":2}' % text,
        b'{"model":"m","n":1,"messages":[%b],  "\\u006e" : 2}' % text,
        b'{"messages":[{"role":"user","content":"a"}],"model":"m","messages":[%b]}' % text,
    ]
    async with gateway(FAST) as world:
        for body in bodies:
            reply = await post(world, CHAT, body)
            assert reply.json()["error"]["code"] == "duplicate_key", body[:60]
        assert forwarded(world) == []


@story
async def test_shapes_that_hid_embeddings_from_the_scan_reach_nothing():
    part = {"type": "image_embeds", "image_embeds": "AAAA"}
    hidden = [
        (CHAT, {"messages": [{"role": "user", "content": ["hi", part]}]}),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": 5}, part]}]}),
        (CHAT, {"messages": [{"role": "user", "content": [None, part]}]}),
        (CHAT, {"messages": [{"role": "user", "content": [[part]]}]}),
        (CHAT, {"messages": [{"role": "tool", "content": [{"type": "text", "text": "a"}, part]}]}),
        ("/v1/chat/completions/batch", {"messages": [HI, [{"role": "user", "content": [part]}]]}),
        (EMBEDDINGS, {"input": "a", "messages": parts(part)["messages"]}),
        (EMBEDDINGS, {"input": [[{"role": "user", "content": [part]}]]}),
        ("/pooling", {"messages": parts(part)["messages"]}),
        ("/classify", {"input": parts(part)["messages"]}),
        ("/v2/embed", {"inputs": [{"content": [part]}]}),
        ("/v1/score", {"queries": "a", "documents": [{"content": [part]}]}),
        ("/score", {"text_1": {"content": [part]}, "text_2": "b"}),
        ("/rerank", {"query": {"content": [part]}, "documents": ["d"]}),
        ("/tokenize", {"messages": parts(part)["messages"]}),
    ]
    async with gateway(FAST) as world:
        for path, fields in hidden:
            reply = await post(world, path, json.dumps({"model": "m", **fields}).encode())
            assert reply.status_code == 400, (path, fields, reply.text)
        assert forwarded(world) == []


@story
async def test_addresses_inside_the_network_are_refused_however_they_are_written():
    hosts = [
        "localhost", "LOCALHOST.", "127.0.0.1", "127.1", "2130706433", "0x7f000001", "0177.0.0.1",
        "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "[::1]",
        "[::ffff:127.0.0.1]", "[::ffff:7f00:1]", "[64:ff9b::7f00:1]", "[fe80::1]", "[fd00::1]",
        "[2002:7f00:1::]", "[::]", "vllm", "metadata.google.internal", "a.svc.cluster.local", "me@10.0.0.1",
        "example.com@10.0.0.1", "10.0.0.1\\@example.com", "10.0.0.1%2f.example.com", "\uff11\uff10.0.0.1",
        "example.com\t@10.0.0.1", "224.0.0.1", "255.255.255.255", "printer.lan", "",
    ]  # fmt: skip
    urls = [f"{scheme}://{host}/x.png" for host in hosts for scheme in ("http", "HTTPS")]
    urls += ["file:///etc/passwd", "FILE:/etc/passwd", "ftp://example.com/a", "/etc/passwd"]
    urls += [
        "http:/10.0.0.1/",
        " http://10.0.0.1/",
        "http:\\\\10.0.0.1\\",
        "gopher://10.0.0.1/",
        "http:",
    ]
    async with gateway(FAST) as world:
        for url in urls:
            reply = await post(world, CHAT, body_of(CHAT, image(url)))
            assert reply.status_code == 400, url
            assert reply.json()["error"]["code"] == "unsupported_media_address", url
            assert url not in reply.text or len(url) < 12
        assert forwarded(world) == []


@story
async def test_what_clients_really_send_arrives_byte_for_byte():
    async with gateway(FAST) as world:
        for name, (path, fields) in CLIENTS.items():
            if fields.get("stream") and "stream_options" not in fields and path == CHAT:
                continue  # usage is asked for on top
            body = body_of(path, {**fields, "max_tokens": 3} if "max_tokens" in fields else fields)
            before = len(forwarded(world))
            await post(world, path, body)
            (*_, last) = forwarded(world)
            assert len(forwarded(world)) > before, name
            assert last.body == body, name


@story
async def test_a_pool_and_a_key_change_what_passes():
    async with gateway(
        FAST, pool={"parameters": {"max": {"n": 2}, "unknown_fields": "refuse"}}
    ) as world:
        reply = await post(world, CHAT, body_of(CHAT, {"n": 3}))
        assert "pools.m.parameters.max.n" in reply.json()["error"]["message"]
        reply = await post(world, CHAT, body_of(CHAT, {"mine": 1}))
        assert reply.json()["error"]["code"] == "unknown_parameter"
        file = world.path.with_name("keys.yaml")
        created = keys.create(file, name="batch", wall_now=time.time())
        text = file.read_text()
        at = text.index("name: batch")
        file.write_text(f"{text[:at]}parameters: {{allow: [priority, n]}}\n    {text[at:]}")
        settings = world.process.handler.settings
        await world.until(lambda: world.process.handler.settings is not settings, 10)
        body = body_of(CHAT, {"n": 3, "priority": -5, "max_tokens": 2})
        assert (await post(world, CHAT, body, created.key)).status_code == 200
        assert forwarded(world)[-1].body == body
        assert (await post(world, CHAT, body)).status_code == 400
        counted = await world.metrics()
        assert 'gateway_unknown_fields_total{endpoint="chat",pool="m"} 1.0' in counted


USAGE = {"prompt_tokens": 9, "completion_tokens": 1, "total_tokens": 10, "prompt_tokens_details": {"cached_tokens": 8}}  # fmt: skip


@story
async def test_tenants_do_not_share_a_prefix_cache_nor_see_what_is_in_it():
    choice = {"index": 0, "message": {"role": "assistant", "content": "a"}, "finish_reason": "stop"}
    answer = json.dumps({"id": "x", "choices": [choice], "usage": USAGE}).encode()
    async with (
        scripted(lambda asked: page(answer)) as backend,
        front_of(backend, prefix_cache="per_tenant") as world,
    ):
        file = world.path.with_name("keys.yaml")
        other = keys.create(file, name="other", wall_now=time.time()).key
        settings = world.process.handler.settings
        await world.until(lambda: world.process.handler.settings is not settings, 10)

        async def salt(key=None, **fields):
            reply = await post(world, CHAT, body_of(CHAT, fields), key)
            assert reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
            assert reply.json()["usage"]["prompt_tokens"] == 9
            return json.loads(backend.asked[-1].body)["cache_salt"]

        mine = await salt()
        assert len(mine) == 43
        assert await salt() == mine
        assert await salt(other) != mine
        parted = await salt(cache_salt="a")
        assert parted not in ("a", mine)
        assert parted == await salt(cache_salt="a")
        assert parted != await salt(other, cache_salt="a")
        assert parted != await salt(cache_salt="b")
        assert "cached" in await world.metrics()  # we still count them


@story
async def test_a_shared_cache_takes_the_clients_salt_as_it_is():
    async with gateway(FAST) as world:
        body = body_of(CHAT, {"cache_salt": "mine", "max_tokens": 1})
        await post(world, CHAT, body)
        assert forwarded(world)[-1].body == body
