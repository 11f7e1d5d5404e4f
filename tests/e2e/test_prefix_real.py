"""Two real vLLM servers that publish their KV events: what their prefix caches find, by their own count."""

from __future__ import annotations

import contextlib
import json
import random
import re
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
import zmq

from gateway.wire import kvevents
from gateway.wire.kvsources import Source, parse_sources
from tests.e2e.support import (
    MODELS,
    free_port,
    gateway,
    get,
    need,
    page,
    wait_until,
)
from tests.e2e.vllms import vllm

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

WORDS = [
    "the",
    "gateway",
    "routes",
    "each",
    "request",
    "to",
    "a",
    "backend",
    "with",
    "free",
    "cache",
]
MANY = 48  # conversations; of so many, chance has 24 +- 3.5 go on where they began


@dataclass
class Engine:
    """A real vLLM at ports that stay the same when it is started again."""

    port: int
    events: int
    replay: int
    stack: contextlib.ExitStack

    def start(self, folder, *more, **env):
        lora = need(MODELS / "lora-a", "the LoRA adapter")
        events = {
            "enable_kv_cache_events": True,
            "endpoint": f"tcp://*:{self.events}",
            "replay_endpoint": f"tcp://*:{self.replay}",
        }
        flags = [
            *("--block-size", "32", "--num-gpu-blocks-override", "1000", "--max-model-len", "1024"),
            *("--kv-events-config", json.dumps(events)),
            *more,
            *("--enable-lora", "--max-lora-rank", "8", "--lora-modules", f"lora-a={lora}"),
        ]
        log = folder / f"vllm-{self.port}-{time.monotonic():.0f}.log"
        self.stack.enter_context(vllm(self.port, *flags, log=log, env=env))

    def stop(self):
        self.stack.close()

    def ready(self):
        return get(f"http://127.0.0.1:{self.port}/health")[0] == 200

    def read_by_engine(self):
        """Return how many tokens of prompts each engine was given."""
        text = page(f"http://127.0.0.1:{self.port}/metrics")
        found = re.findall(r'^vllm:prompt_tokens_total\{engine="(\d+)"[^}]*\} (\S+)$', text, re.M)
        return {engine: float(tokens) for engine, tokens in found}

    def read(self):
        """Return how many tokens of prompts it was given since it started."""
        return sum(self.read_by_engine().values())

    def found(self):
        """Return how many tokens were looked for in its prefix cache, and how many were found."""
        text = page(f"http://127.0.0.1:{self.port}/metrics")
        totals = [
            re.findall(rf"^vllm:prefix_cache_{name}_total\{{[^}}]*\}} (\S+)$", text, re.M)
            for name in ("queries", "hits")
        ]
        return tuple(sum(map(float, values)) for values in totals)


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    folder = tmp_path_factory.mktemp("engines")
    with contextlib.ExitStack() as stack:
        both = [
            Engine(free_port(), free_port(), free_port(), stack.enter_context(contextlib.ExitStack()))
            for _ in range(2)
        ]  # fmt: skip
        for each in both:
            each.start(folder)
            wait_until(each.ready, 240, "vLLM serves")
        yield both


@contextlib.contextmanager
def routed(folder, engines, prefix, **more):
    """Run a gateway in front of both; wait until it knows all that it can know."""
    backends = [f"http://127.0.0.1:{each.port}" for each in engines]
    pool = {"backends": backends, "prefix": prefix, "tokenizer": str(MODELS / "tiny"), **more}
    # A scrape that saw the last request as it ended has the next one go elsewhere, until the next scrape.
    extra = "health: {timeout: 10s, scrape_interval: 200ms}\ntimeouts: {connect: 10s}\n"
    with gateway(folder, "pools: " + json.dumps({"tiny": pool}), extra) as world:
        wait_until(lambda: set(states(world)) == {"ready"}, 60, "all serve")
        if prefix == "precise":
            wait_until(lambda: all(known(world)), 60, "their events are followed")
        yield world


def told(world, name):
    overview = json.loads(get(world.admin_url + "/admin/v1/overview", timeout=30)[1])
    return [each[name] for each in overview["pools"][0]["backends"]]


def states(world):
    return told(world, "state")


def known(world):
    return [each["known"] for each in told(world, "kv_events")]


def text(rng, words):
    return " ".join(rng.choices(WORDS, k=words))


class Conversation:
    """A client that asks turn after turn, with all that was said before."""

    def __init__(self, rng, words=40, model="tiny", **more):
        self.rng, self.model, self.more = rng, model, more
        self.messages = [{"role": "system", "content": text(rng, words)}]

    def turn(self, world):
        self.messages.append({"role": "user", "content": text(self.rng, 25)})
        body = {"model": self.model, "messages": self.messages, "max_tokens": 8, "ignore_eos": True}
        status, reply = world.post("/v1/chat/completions", {**body, **self.more})
        assert status == 200, reply
        self.messages.append(reply["choices"][0]["message"] | {"content": text(self.rng, 4)})


def play(world, conversations, turns, *, clients=2):
    """Have all conversations go on, some at a time, in an order that is another in each turn."""
    chance = random.Random(1)
    for _ in range(turns):
        chance.shuffle(conversations)
        with ThreadPoolExecutor(clients) as at_once:
            list(at_once.map(lambda each: each.turn(world), conversations))


def begin(world, talks, *, without):
    """Have conversations begin while one backend is drained, at the other."""
    order(world, f"backends/tiny/{without}:drain")
    play(world, talks, 1)
    order(world, f"backends/tiny/{without}:undrain")
    wait_until(lambda: states(world) == ["ready", "ready"], 60, "both serve")
    # What the last scrape saw counts for a second: who begins meanwhile goes to the one that rested.
    wait_until(lambda: told(world, "running") == [0, 0], 60, "both are known to be idle")


def order(world, path):
    post(f"{world.admin_url}/admin/v1/{path}", {})


@contextlib.contextmanager
def counted(engines):
    """Yield a function that tells which part was found of what was looked for since then."""
    before = [each.found() for each in engines]

    def ratio():
        after = [each.found() for each in engines]
        queries, hits = (
            sum(now[place] - then[place] for now, then in zip(after, before, strict=True))
            for place in (0, 1)
        )
        return hits / queries

    yield ratio


def test_the_frames_of_a_real_engine(engines):
    engine = engines[0]
    with zmq.Context() as context, context.socket(zmq.SUB) as events, context.socket(zmq.DEALER) as replay:  # fmt: skip
        for socket, port in ((events, engine.events), (replay, engine.replay)):
            socket.setsockopt(zmq.RCVTIMEO, 30_000)
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(f"tcp://127.0.0.1:{port}")
        events.subscribe(b"")
        stored = []

        def ask():
            ids = [random.randrange(100, 300) for _ in range(100)]
            body = {"model": "lora-a", "prompt": ids, "max_tokens": 1, "cache_salt": "s"}
            post(f"http://127.0.0.1:{engine.port}/v1/completions", body)
            return ids

        while not events.poll(1000):  # until the subscription is there, nothing is heard
            ask()
        ids = ask()
        while [each.token_ids for each in stored] != [ids[:96]]:
            number, payload = kvevents.published(events.recv_multipart())
            stored = [each for each in kvevents.parse_batch(payload).events if isinstance(each, kvevents.BlockStored)]  # fmt: skip
        assert stored[0].parent_block_hash is None
        assert len(stored[0].block_hashes) == 3
        assert (stored[0].block_size, stored[0].medium, stored[0].lora_name) == (
            32,
            "GPU",
            "lora-a",
        )
        assert stored[0].extra_keys == [["lora-a", "s"], ["lora-a"], ["lora-a"]]
        assert stored[0].kv_cache_spec_kind == "full_attention"
        assert time.time() - 60 < kvevents.time_of(payload) < time.time() + 1
        replay.send_multipart(kvevents.replay_from(number))
        assert kvevents.replayed(replay.recv_multipart()) == (number, payload)
        assert kvevents.replayed(replay.recv_multipart()) is None
    page = get(f"http://127.0.0.1:{engine.port}/kv_event_sources")[1]
    assert parse_sources(page, None) == {
        0: Source(f"tcp://127.0.0.1:{engine.events}", f"tcp://127.0.0.1:{engine.replay}")
    }


def post(url, body):
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})  # fmt: skip
    with urllib.request.urlopen(request, timeout=60) as reply:
        assert reply.status == 200


def test_what_is_found_by_load_by_guess_and_by_events(engines, tmp_path):
    """Half of the conversations begin at each engine. Where nothing says so, half of them go on at the other.

    A gateway that starts anew has forgotten its guesses, and sends them where their beginnings have their
    home. It is told the events again.
    """
    found, anew = {}, {}
    for prefix in ("off", "approximate", "precise"):
        (folder := tmp_path / prefix).mkdir()
        talks = [Conversation(random.Random(f"{prefix} {place}"), 80) for place in range(MANY)]
        with routed(folder, engines, prefix) as world:
            begin(world, talks[::2], without="b1")
            begin(world, talks[1::2], without="b2")
            with counted(engines) as ratio:
                play(world, talks, 1, clients=1)
                found[prefix] = ratio()
        with routed(folder, engines, prefix) as world, counted(engines) as ratio:
            play(world, talks, 1, clients=1)
            anew[prefix] = ratio()
    print(found, anew)
    # All that can be found is 0.75. By chance it is 0.37 +- 0.05; by their homes, which are the same each time, 0.47.
    assert found["approximate"] > max(found["off"] + 0.12, anew["approximate"] + 0.2)
    assert found["precise"] > found["off"] + 0.12
    assert anew["precise"] > anew["approximate"] + 0.15


def test_what_an_engine_held_is_forgotten_when_it_starts_anew(engines, tmp_path):
    talks = [Conversation(random.Random(f"forgets {place}"), 80) for place in range(16)]
    with routed(tmp_path, engines, "approximate") as world:
        begin(world, talks, without="b1")
        before = [each.read() for each in engines]
        play(world, talks, 1, clients=1)
        strays, stays = (each.read() - then for each, then in zip(engines, before, strict=True))
        assert strays == 0 < stays
        engines[1].stop()
        wait_until(lambda: states(world)[1] != "ready", 60, "it is out of rotation")
        engines[1].start(tmp_path)
        wait_until(engines[1].ready, 240, "vLLM serves again")
        wait_until(lambda: states(world) == ["ready", "ready"], 60, "both serve")
        then = engines[0].read()
        play(world, talks, 1, clients=1)
        assert engines[0].read() - then > stays / 4  # nothing keeps them at the other


def test_adapters_and_salts_have_caches_of_their_own_and_are_found_there(engines, tmp_path):
    kinds = [{}, {"model": "lora-a"}, {"cache_salt": "mine"}, {"model": "lora-a", "cache_salt": "mine"}]  # fmt: skip
    talks = [Conversation(random.Random("same"), **kind) for kind in kinds]
    with routed(tmp_path, engines, "precise") as world:
        wait_until(
            lambda: all("lora-a" in each for each in told(world, "models")), 60, "it is listed"
        )
        with counted(engines) as ratio:
            play(world, talks, 1)
            assert ratio() == 0  # the same words, and nobody shares them
        with counted(engines) as ratio:
            play(world, talks, 2, clients=1)
            assert ratio() > 0.5
    assert [len(each.messages) for each in talks] == [7] * 4


def test_an_engine_that_starts_anew_is_followed_anew(engines, tmp_path):
    with routed(tmp_path, engines, "precise") as world:
        talks = [Conversation(random.Random(f"restart {place}")) for place in range(4)]
        play(world, talks, 2)
        engines[0].stop()
        wait_until(lambda: known(world) == [False, True], 60, "its end is seen")
        wait_until(lambda: states(world)[0] != "ready", 60, "it is out of rotation")
        play(world, talks, 1)
        engines[0].start(tmp_path)
        wait_until(engines[0].ready, 240, "vLLM serves again")
        wait_until(lambda: states(world) == ["ready", "ready"], 60, "both serve")
        wait_until(lambda: all(known(world)), 60, "both are followed")
        first, _ = told(world, "kv_events")
        assert (first["blocks"], first["losses"]) == (0, 1)
        with counted(engines[1:]) as ratio:
            play(world, talks, 1, clients=1)
            assert ratio() > 0.5  # they stay where they are cached


def test_each_of_several_engines_of_one_server_gets_its_own_conversations(tmp_path):
    """They answer as one, and each conversation goes on at the one that has it cached."""
    with contextlib.ExitStack() as stack:
        server = Engine(free_port(), free_port(), free_port() + 1000, stack)
        server.start(tmp_path, "--data-parallel-size", "2", VLLM_ENABLE_V1_MULTIPROCESSING="1")
        wait_until(server.ready, 400, "vLLM serves with two engines")
        for prefix in ("approximate", "precise"):
            (folder := tmp_path / prefix).mkdir()
            # Where one is answered before the next comes, chance has both engines get some.
            talks = [Conversation(random.Random(f"{prefix} {place}")) for place in range(16)]
            with routed(folder, [server], prefix) as world:
                before = server.read_by_engine()
                play(world, talks, 1, clients=6)
                after = server.read_by_engine()
                assert len(after) == 2
                assert all(after[each] > before[each] for each in after)
                # One after the other: no load decides where they go.
                with counted([server]) as ratio:
                    play(world, talks, 2, clients=1)
                    assert ratio() > 0.5
