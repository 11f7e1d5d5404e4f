"""A real vLLM that the gateway starts: it does not start, dies, freezes, is restarted; nobody is left behind.

Two sites: `Troubles` has one pool for each way of not coming up, `Fleet` has two servers that serve.
What a server costs is half a minute of both cores, so each test leaves its site as it found it.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import http.client
import io
import json
import os
import pathlib
import re
import select
import signal
import socket
import threading
import time
from dataclasses import dataclass

import pytest

from tests.e2e.support import (
    MODELS,
    VLLM,
    VLLM_ENV,
    Stalls,
    Supervised,
    free_port,
    get,
    need,
    process,
    processes_of,
)
from tests.e2e.vllms import FORKING

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200)]

START_S = 300.0  # half a minute when nothing else runs
PATIENCE_S = 300.0  # for what comes at once where a processor is free; no claim of ours
FOUND_S = 20.0  # most that a frozen engine may go unnoticed; 5 to 8 are usual
OUT_S = 1.5  # most that new requests still go to an engine that died
ENV = VLLM_ENV | FORKING | {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
SUPERVISION = {"backoff": "1s", "max_backoff": "2s", "stop_grace": "5s", "max_restarts": 20}


def launch(gpu, model="tiny", port=None, **more):
    """Return the `launch` of a server. Each has a GPU of its own, or they would start in turn."""
    python = need(VLLM / "bin/python", "vLLM")
    args = {"model": str(MODELS / model), "served-model-name": model, "max-model-len": 2048,
            "enforce-eager": True, "dtype": "float32"}  # fmt: skip
    flags = {name.replace("_", "-"): value for name, value in more.items() if name != "orphan"}
    return {
        "command": [python, "-m", "vllm.entrypoints.openai.api_server"],
        "port": port or free_port(),
        "gpus": [gpu],
        "args": args | flags,
        "env": ENV,
        "orphan": more.get("orphan", "adopt"),
    }


def pool(name, *launches, supervision=SUPERVISION, **more):
    backends = [{"name": f"b{n}", "launch": each} for n, each in enumerate(launches, 1)]
    settings = {"supervision": supervision, "backends": backends, **more}
    return f"  {name}: {json.dumps(settings)}\n"


@contextlib.contextmanager
def site(folder, pools, more=""):
    """Run a gateway and what it starts; at the end of all tests nothing of it may be left."""
    running = Supervised(folder, pools, more)
    try:
        running.start()
        yield running
    finally:
        left = running.end()
    assert not left, f"these outlived it: {left}{running.story()}"


# --- what does not start --------------------------------------------------------------------------


class TestTroubles:
    """Each pool has its own reason not to start, and is told so in a sentence."""

    @pytest.fixture(scope="class")
    @classmethod
    def site(cls, tmp_path_factory):
        need(MODELS / "tiny", "the tiny model")
        need(MODELS / "tiny-broken", "the model whose engine dies at its first token")
        lora = need(MODELS / "lora-a", "the adapter of rank 8")
        taken, late = socket.socket(), free_port()
        with contextlib.closing(taken):
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            pools = (
                pool("small", launch(0, num_gpu_blocks_override=8), remedies=["lower_max_model_len"], min_context=256)
                + pool("broken", launch(1, "tiny-broken"), supervision=SUPERVISION | {"max_restarts": 2})
                + pool("rank", launch(2, enable_lora=True, max_lora_rank=1, lora_modules=f"lora-a={lora}"))
                + pool("missing", launch(3, "no-such-model"))
                + pool("flag", launch(4, max_modle_len=4096))
                + pool("taken", launch(5, port=taken.getsockname()[1]))
                + pool("late", launch(6, port=late))
            )  # fmt: skip
            with site(tmp_path_factory.mktemp("troubles"), pools) as running:
                once = {"rank/b1", "missing/b1", "flag/b1", "late/b1"}
                running.until(lambda: once <= launched(running), PATIENCE_S, "all are launched")
                # One failure of these is enough, and costs less.
                for each in once:
                    running.verb("hold", "--pool", each.partition("/")[0])
                # Somebody takes this port after the launcher found it free, and before vLLM binds it.
                with contextlib.closing(socket.socket()) as thief:
                    thief.bind(("127.0.0.1", late))
                    thief.listen()
                    yield running

    def failed(self, site, backend):
        """Return the event of a start that failed; what ended leaves no process."""
        site.until(lambda: site.events(backend, "start_failed"), START_S, f"{backend} fails")
        assert processes_of(site.state, backend.replace("/", "--")) == set()
        return site.events(backend, "start_failed")[0]

    def test_a_context_too_long_for_the_kv_cache_is_shortened_to_what_fits(self, site):
        site.until(lambda: site.serves("small/b1"), START_S, "small/b1 serves")
        told = [(each["kind"], each["label"]) for each in site.events("small/b1")]
        assert told == [
            ("launch", "exited"),
            ("start_failed", "kv_cache_too_small_for_max_model_len"),
            ("remedy", "lower_max_model_len"),
            ("restart", "start_failed"),
            ("started", "started"),
        ], site.story()
        (remedy,) = site.events("small/b1", "remedy")
        assert "--max-model-len 896" in remedy["detail"]
        models = json.loads(get(f"http://{site.netloc}/v1/models", timeout=30)[1])["data"]
        (shown,) = [each for each in models if each["id"] == "small"]
        assert shown["context_window"] == 896
        kept = json.loads((site.state / "overrides.json").read_text())["small/b1"]
        assert kept["args"] == {"max-model-len": 896}
        assert [each["remedy"] for each in kept["applied"]] == ["lower_max_model_len"]
        answer = ask(site, "small", "hello " * 20, max_tokens=20)
        assert (answer.status, answer.backend, answer.whole) == (200, "small/b1", True), answer
        answer = ask(site, "small", "hello", max_tokens=1000)
        assert answer.status == 400, answer
        assert b"896" in answer.body

    def test_an_engine_that_dies_at_its_first_token_is_left_alone_after_two_restarts(self, site):
        site.until(lambda: site.events("broken/b1", "suspended"), START_S, "broken/b1 is suspended")
        kinds = [each["kind"] for each in site.events("broken/b1")]
        assert kinds.count("launch") == 1
        assert kinds.count("restart") == 2
        assert kinds[-1] == "suspended"
        assert "started" not in kinds, site.story()
        (suspended,) = site.events("broken/b1", "suspended")
        deaths = site.events("broken/b1", "start_failed") + site.events("broken/b1", "exited")
        assert {each["label"] for each in deaths} == {"engine_dead_runtime"}, site.story()
        assert "2 restarts within" in suspended["detail"]
        assert "head" in suspended["detail"].lower(), suspended
        shown = site.backend("broken/b1")
        assert (shown["phase"], shown["reason"]) == ("down", "suspended")
        assert processes_of(site.state, "broken--b1") == set()

    def test_a_rank_above_the_servers_is_told_with_the_rank_that_is_needed(self, site):
        told = self.failed(site, "rank/b1")
        assert told["label"] == "lora_misconfigured", site.story()
        assert "rank is 8, the server allows 1" in told["detail"]
        assert "--max-lora-rank 8" in told["detail"]

    def test_a_model_that_is_not_there_is_told_with_its_path(self, site):
        told = self.failed(site, "missing/b1")
        assert told["label"] == "model_not_found", site.story()
        assert "no-such-model" in told["detail"]
        assert "--model" in told["detail"]

    def test_a_flag_that_vllm_does_not_know_is_told_by_its_name(self, site):
        told = self.failed(site, "flag/b1")
        assert told["label"] == "bad_cli_argument", site.story()
        assert "--max-modle-len" in told["detail"]

    def test_a_port_that_is_taken_is_told_before_anything_starts(self, site):
        site.until(
            lambda: site.events("taken/b1", "launch_failed"), PATIENCE_S, "taken/b1 is refused"
        )
        told = site.events("taken/b1", "launch_failed")[0]
        assert told["label"] == "port_in_use"
        assert "is already in use by" in told["detail"]
        assert str(os.getpid()) in told["detail"]
        assert "launch.port" in told["detail"]
        assert site.log_of("taken--b1") == ""

    def test_a_port_that_is_taken_meanwhile_is_told_by_the_engines_log(self, site):
        told = self.failed(site, "late/b1")
        assert told["label"] == "port_in_use", site.story()
        assert "--port" in told["detail"]


# --- what serves, and goes wrong ------------------------------------------------------------------


class TestFleet:
    """Two servers of one pool. What becomes of one is made up for by the other."""

    @pytest.fixture(scope="class")
    @classmethod
    def fleet(cls, tmp_path_factory):
        need(MODELS / "tiny", "the tiny model")
        lora = need(MODELS / "lora-a", "the adapter")
        adapters = {
            "enable_lora": True,
            "max_lora_rank": 8,
            "max_loras": 2,
            "lora_modules": f"lora-a={lora}",
        }
        first, second = launch(0, **adapters), launch(1, orphan="stop", **adapters)
        # Two engines on the processors of this machine are slow, which is not what is tried here.
        slow = {"ttft": "60s", "itl": "5s"}
        patient = "health: {timeout: 10s}\ntimeouts: {connect: 10s}\n"
        folder = tmp_path_factory.mktemp("fleet")
        with site(folder, pool("tiny", first, second, slo=slow), patient) as running:
            yield running

    @pytest.fixture
    def site(self, fleet):
        fleet.until(
            lambda: fleet.serves("tiny/b1") and fleet.serves("tiny/b2"), START_S, "both serve"
        )
        return fleet

    def test_an_engine_killed_under_load_is_replaced_with_its_adapters_and_gets_no_request(
        self, site
    ):
        load_adapter(site, "tiny--b1", "lora-b")
        site.until(
            lambda: "lora-b" in names(site),
            PATIENCE_S,
            "the gateway knows what was loaded at run time",
        )
        before, told = site.launched("tiny--b1"), len(site.events())
        old = processes_of(site.state, "tiny--b1")
        with Load(site, streams=16, tokens=400) as load, Stalls() as stalls:
            site.until(lambda: in_flight(site, "tiny/b1") >= 6, PATIENCE_S, "it has work")
            engine = site.engine("tiny--b1").pid
            handle = os.pidfd_open(engine)
            killed_at = time.time()
            os.kill(engine, signal.SIGKILL)
            select.select([handle], [], [])
            ended_at = time.time()  # not at once where its threads have to wait for a processor
            os.close(handle)
            load.until(lambda: time.time() > killed_at + 2 * OUT_S, PATIENCE_S)
            stalled_s = stalls.seconds
            load.calm()
            site.until(lambda: restarted(site, "tiny/b1", told), START_S, "tiny/b1 serves again")
            back_at = restarted(site, "tiny/b1", told)
            load.until(
                lambda: any(each.backend == "tiny/b1" for each in load.since(back_at)), PATIENCE_S
            )

        failed = [each for each in load.answers if not each.good]
        out_at = left_at(site, "tiny/b1", killed_at)
        # Whoever was sent there until it was out: these may fail, and nobody else.
        lost = [
            each
            for each in load.answers
            if each.backend == "tiny/b1" and each.began < out_at and each.ended > killed_at
        ]
        (exited, *_) = [each for each in site.events("tiny/b1", "exited") if each["at"] > killed_at]
        print(f"killed: {len(failed)} failed of {len(lost)} on it and {len(load.answers)} in all; ended after"
              f" {ended_at - killed_at:.1f} s, out {out_at - ended_at:.3f} s later (stalled {stalled_s:.1f} s), examined after"
              f" {exited['at'] - killed_at:.1f} s, back after {back_at - killed_at:.0f} s")  # fmt: skip
        assert exited["label"] == "engine_dead_runtime", site.story()
        assert out_at - ended_at <= OUT_S + stalled_s, site.story()
        others = [each for each in failed if each not in lost]
        assert not others, f"{[str(each) for each in others]}{site.story()}"
        meanwhile = [each for each in load.answers if out_at < each.began < back_at - 0.1]
        assert meanwhile
        assert {each.backend for each in meanwhile} == {"tiny/b2"}, site.story()

        after = site.launched("tiny--b1")
        assert after["pid"] != before["pid"]
        assert not {each for each in old if process(each.pid) == each}
        adapters = {
            each["label"]
            for each in site.events("tiny/b1", "adapter")
            if killed_at < each["at"] < back_at
        }
        assert adapters == {"lora-b"}, site.story()
        # The new server's own log: one token, the adapter, the warm-up, and only then clients.
        requests = re.findall(
            r'"POST (/v1/\S+) HTTP', site.log_of("tiny--b1").rpartition(": start ")[2]
        )
        assert requests[:3] == ["/v1/completions", "/v1/load_lora_adapter", "/v1/completions"]
        assert set(requests[3:]) == {"/v1/chat/completions"}
        answer = ask(site, "lora-b", "hello", max_tokens=4)
        assert (answer.status, answer.backend, answer.whole) == (200, "tiny/b1", True)

    def test_an_engine_that_stands_still_is_found_though_its_health_is_good(self, site):
        port, told = port_of(site, "tiny--b1"), len(site.events())
        old = processes_of(site.state, "tiny--b1")
        health = []
        with Load(site, streams=8, tokens=100) as load:
            load.until(lambda: any(each.backend == "tiny/b1" for each in load.answers), PATIENCE_S)
            load.calm()
            site.until(lambda: site.serves("tiny/b1"), PATIENCE_S, "tiny/b1 serves")
            site.until(lambda: in_flight(site, "tiny/b1"), PATIENCE_S, "it has work")
            stopped_at, began = time.time(), time.monotonic()
            os.kill(site.engine("tiny--b1").pid, signal.SIGSTOP)

            def found():
                health.append(get(f"http://127.0.0.1:{port}/health", timeout=30)[0])
                return site.backend("tiny/b1").get("phase", "ready") != "ready"

            with Stalls() as stalls:
                site.until(found, PATIENCE_S, "the engine is found frozen")
            found_s = time.monotonic() - began  # the wall clock may be set meanwhile
            site.until(lambda: restarted(site, "tiny/b1", told), START_S, "tiny/b1 serves again")
            back_at = restarted(site, "tiny/b1", told)
        (restart, *_) = [
            each for each in site.events("tiny/b1", "restart") if each["at"] > stopped_at
        ]
        assert restart["label"] == "frozen", site.story()
        assert re.search(r"no progress for \d+ s, and 2 test requests in a row failed|requests are running without progress",
                         restart["detail"]), restart  # fmt: skip
        (suspect, *_) = [e for e in site.events("tiny/b1", "suspect") if e["at"] > stopped_at]
        held = [
            each
            for each in load.answers
            if each.backend == "tiny/b1" and each.began < back_at - 0.1 and each.ended > stopped_at
        ]
        out_at, down_at = (left_at(site, "tiny/b1", stopped_at, to) for to in ("", "down"))
        moments = {
            "out of rotation": out_at,
            "suspected": suspect["at"],
            "last new request": max((each.began for each in held), default=stopped_at),
            "down": down_at,
            "last held request ended": max((each.ended for each in held), default=stopped_at),
            "new process serves": back_at,
        }
        told = ", ".join(f"{what} {at - stopped_at:.1f} s" for what, at in moments.items())
        print(f"frozen with {len(held)} requests: {told} (stalled {stalls.seconds:.1f} s)")
        assert not [str(each) for each in held if each.began > out_at], site.story()
        assert not [str(each) for each in held if each.ended > back_at], site.story()
        assert found_s <= FOUND_S + stalls.seconds, site.story()
        # All the while its API process said that it is well.
        assert set(health[:-1]) == {200}
        assert not {each for each in old if process(each.pid) == each}
        elsewhere = [each for each in load.answers if not each.good and each.backend != "tiny/b1"]
        assert not elsewhere, site.story()

    def test_both_are_restarted_in_turn_under_fifty_streams_and_none_is_cut(self, site):
        before = {name: site.launched(name)["pid"] for name in ("tiny--b1", "tiny--b2")}
        with Load(site, streams=4, tokens=16, pause_s=4.0) as others:
            for name in ("tiny/b1", "tiny/b2"):
                self.restarted_under_load(site, name)
            done_at = time.time()
            others.until(
                lambda: {each.backend for each in others.since(done_at)} == {"tiny/b1", "tiny/b2"},
                PATIENCE_S,
            )
        bad = [str(each) for each in others.answers if not each.good]
        assert not bad, f"{len(bad)} of {len(others.answers)}: {bad[:3]}{site.story()}"
        assert all(site.launched(name)["pid"] != pid for name, pid in before.items())

    def restarted_under_load(self, site, name):
        """Restart one while fifty streams run; all come to their end."""
        told = len(site.events())
        # Each client asks again at its stream's end, until the order is given: however slowly they
        # begin, there comes a moment at which all fifty run.
        with Load(site, streams=50, tokens=900) as load:
            load.until(lambda: in_flight(site, "tiny/b1", "tiny/b2") >= 50, PATIENCE_S)
            ordered = site.order(name, "restart")
            load.rest()
            site.until(lambda: restarted(site, name, told), START_S, f"{name} serves again")
        print(f"rolling: {ordered['sentence']}")
        bad = [str(each) for each in load.answers if not each.good]
        assert not bad, f"{len(bad)} of {len(load.answers)}: {bad[:3]}{site.story()}"
        assert ordered["requests"] >= 10, ordered
        assert {each.backend for each in load.answers} == {"tiny/b1", "tiny/b2"}
        assert len(load.answers) >= 50

    def test_servers_that_outlive_a_killed_gateway_are_adopted_or_stopped_as_configured(self, site):
        before = {name: site.launched(name)["pid"] for name in ("tiny--b1", "tiny--b2")}
        engines = {name: processes_of(site.state, name) for name in before}
        told = {name: len(site.events(name)) for name in ("tiny/b1", "tiny/b2")}

        def news(name):
            """What a gateway told of a backend from then on; events outlive it."""
            return [each["kind"] for each in site.events(name)[told[name] :]]

        site.kill()
        assert {
            name: processes_of(site.state, name) for name in before
        } == engines  # nobody died with it
        site.start()
        site.until(
            lambda: "started" in news("tiny/b1"), PATIENCE_S, "tiny/b1 is adopted and serves"
        )
        # Its old server gets nothing.
        assert site.backend("tiny/b2")["phase"] == "starting", site.story()
        assert site.launched("tiny--b1")["pid"] == before["tiny--b1"]
        assert processes_of(site.state, "tiny--b1") == engines["tiny--b1"]
        assert news("tiny/b1") == ["started"], site.story()
        site.until(lambda: site.serves("tiny/b2"), START_S, "tiny/b2 is started anew")
        assert news("tiny/b2") == ["launch", "started"], site.story()
        assert site.launched("tiny--b2")["pid"] != before["tiny--b2"]
        assert not {each for each in engines["tiny--b2"] if process(each.pid) == each}
        answer = ask(site, "lora-a", "hello", max_tokens=4)
        assert (answer.status, answer.whole) == (200, True)


# --- clients --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answer:
    """What a client got, and when (seconds since the epoch)."""

    began: float
    ended: float
    status: int
    backend: str
    whole: bool  # the stream came to its own end
    body: bytes

    @property
    def good(self) -> bool:
        return self.status == 200 and self.whole

    def __str__(self) -> str:
        return f"{self.status} of {self.backend} after {self.ended - self.began:.1f} s: {self.body[-200:]!r}"


def ask(site, model, text, max_tokens):
    return asyncio.run(asked(site.netloc, model, text, max_tokens))


async def asked(netloc, model, text, max_tokens):
    """Ask for a stream and read it to its end."""
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": text}],
                       "max_tokens": max_tokens, "ignore_eos": True, "stream": True}).encode()  # fmt: skip
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: {netloc}\r\nconnection: close\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    began, told, status, backend = time.time(), bytearray(), 0, ""
    try:
        async with asyncio.timeout(600):
            reader, writer = await asyncio.open_connection(*netloc.split(":"))
            with contextlib.closing(writer):
                writer.write(head.encode() + body)
                while piece := await reader.read(65536):
                    told += piece
        reply = http.client.HTTPResponse(Told(told))
        reply.begin()
        status, backend = reply.status, reply.headers.get("x-gateway-backend", "")
        text = reply.read()
    except (OSError, http.client.HTTPException) as error:
        text = bytes(told) + repr(error).encode()
    whole = text.rstrip().endswith(b"data: [DONE]") and b'"error"' not in text
    return Answer(began, time.time(), status, backend, whole, text)


class Told:
    """What a connection told, for a parser that wants a socket."""

    def __init__(self, told):
        self.told = told

    def makefile(self, *_):
        return io.BytesIO(self.told)


class Load:
    """So many clients, each with one stream after the other, until they `rest` or the load ends.

    `calm` goes on with little, and leaves the processors to others.

    They share one thread, and look at nothing before a stream has ended: fifty threads that parse
    would starve the test itself.
    """

    def __init__(self, site, *, streams, tokens, pause_s=0.0):
        self.site, self.streams, self.tokens, self.pause_s = site, streams, tokens, pause_s
        self.answers = []
        self._loop = asyncio.new_event_loop()
        self._over = asyncio.Event()
        self._thread = threading.Thread(
            target=self._loop.run_until_complete, args=[self._clients()]
        )

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join()
        self._loop.close()

    def calm(self):
        self.tokens, self.pause_s = 16, 4.0

    def rest(self):
        self.pause_s = 3600.0

    async def _clients(self):
        async with asyncio.TaskGroup() as group:
            for _ in range(self.streams):
                group.create_task(self._client())

    async def _client(self):
        while not self._over.is_set():
            # No two prompts begin alike: else all would go to the server that has the first in its cache.
            prompt = f"{time.time_ns()} hello"
            answer = await asked(self.site.netloc, "tiny", prompt, self.tokens)
            self.answers.append(answer)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.pause_s or (0.001 if answer.good else 0.2)):
                    await self._over.wait()

    def since(self, at):
        return [each for each in self.answers if each.began > at]

    def until(self, condition, seconds):
        self.site.until(
            condition, seconds, f"clients; the last: {[str(each) for each in self.answers[-3:]]}"
        )


def launched(site):
    return {each["backend"] for each in site.events(kind="launch")}


def left_at(site, backend, after, to=""):
    """Return when a backend first left `ready` (or came to a phase) after a moment, by the gateway's log."""
    word = f'"after":"{to}"' if to else '"before":"ready"'
    events = (json.loads(each) for each in site.log.read_text().splitlines() if word in each)
    times = (
        datetime.datetime.fromisoformat(each["ts"]).timestamp()
        for each in events
        if each["backend"] == backend
    )
    return next(at for at in times if at > after)


def in_flight(site, *backends):
    return sum(site.backend(each).get("in_flight", 0) for each in backends)


def names(site):
    return {
        each["id"]
        for each in json.loads(get(f"http://{site.netloc}/v1/models", timeout=30)[1])["data"]
    }


def port_of(site, backend):
    words = pathlib.Path(f"/proc/{site.launched(backend)['pid']}/cmdline").read_text().split("\0")
    return int(words[words.index("--port") + 1])


def load_adapter(site, backend, name):
    """Load an adapter as an operator does: at the server, behind the gateway's back."""
    port = port_of(site, backend)
    connection = http.client.HTTPConnection(f"127.0.0.1:{port}", timeout=PATIENCE_S)
    body = json.dumps({"lora_name": name, "lora_path": need(MODELS / name, "the adapter")})
    connection.request("POST", "/v1/load_lora_adapter", body, {"content-type": "application/json"})
    reply = connection.getresponse()
    told = reply.read()
    connection.close()
    assert reply.status == 200 or b"already" in told, told


def restarted(site, backend, told):
    """Return when a backend came into service again, by the events after the first `told`; 0: not yet."""
    events = site.events()[told:]
    return next(
        (each["at"] for each in events if (each["backend"], each["kind"]) == (backend, "started")),
        0,
    )
