"""The shared store on a real Redis: what every store guarantees, and what befalls this one."""

import asyncio
import contextlib
import math
import signal
import socket
import subprocess
import time

import pytest

from gateway.cli.doctor.onredis import redis_findings
from gateway.core.aio import SystemClock
from gateway.core.limits import KeyLimits, Rule
from gateway.limiting.limiter import Limiter
from gateway.limiting.rules import NOTHING
from gateway.store import scripts
from gateway.store.onredis import redis_store
from gateway.store.scripts import BUDGET_S
from gateway.store.shared import StoreUnavailable
from tests.e2e.support import GATEWAY
from tests.faults.toxic import Toxic, toxic
from tests.limitercases import amounts, plan_of, used_of
from tests.ports import free_port
from tests.redisserver import PROGRAMS, patient_store, redis_server, time_passes
from tests.storecases import Desk, Reader, StoreCases

pytestmark = pytest.mark.e2e


class RedisDesk(Desk):
    """Time goes on at the server too."""

    def __init__(self, server):
        super().__init__(lambda clock: patient_store(server.url, clock))
        self.server = server

    def passes(self, seconds):
        super().passes(seconds)
        time_passes(self.server, seconds)


@pytest.fixture(scope="module", params=PROGRAMS)
def server(request):
    with redis_server(program=request.param) as server:
        yield server


@pytest.fixture
def desk(server):
    server.ask("FLUSHALL")
    desk = RedisDesk(server)
    desk.run(desk.store.link.client.ping())  # the first call waits for no connection
    yield desk
    desk.close()


class TestRedis(StoreCases):
    def test_a_lease_from_a_clock_that_was_wrong_holds_nobody_up(self, desk):
        desk.acquire("chat", "a")
        desk.server.ask("PEXPIRE", "gw1:{chat}:lease", 3_600_000)
        assert desk.acquire("chat", "b").holder == "b"

    def test_scripts_that_the_server_forgot_are_sent_again(self, desk):
        desk.hold("chat")
        desk.server.ask("SCRIPT", "FLUSH")
        assert desk.holds() == {"chat": math.inf}

    def test_a_claim_whose_confirmation_was_lost_is_ours_when_we_ask_again(self, desk):
        hurried = redis_store(desk.server.url, desk.clock)

        def at_last(*asked):
            while True:
                with contextlib.suppress(StoreUnavailable):  # the machine may be busy
                    return desk.run(getattr(hurried, asked[0])(*asked[1:]))

        at_last("claim_restart", "p/b", "one")  # so it is connected, and the script is known
        desk.server.signal(signal.SIGSTOP)
        with pytest.raises(StoreUnavailable):
            desk.run(hurried.claim_restart("p/a", "one"))
        desk.server.signal(signal.SIGCONT)  # it takes up what was asked
        while not desk.server.ask("KEYS", "*claim*"):
            time.sleep(0.01)
        assert not desk.claim_restart("p/a", "one")
        assert [at_last("claim_restart", "p/a", "one") for _ in range(2)] == [True, False]
        desk.run(hurried.close())

    def test_every_key_tells_the_version_of_its_format(self, desk):
        desk.acquire("restarts/chat", "a")
        desk.claim_restart("chat/a", "one")
        desk.hold("chat")
        with desk.server.client() as client:
            keys = [*client.scan_iter("*")]
        assert len(keys) == 4
        assert all(key.startswith(scripts.PREFIX) for key in keys)


def test_a_log_that_was_lost_begins_anew_for_those_who_read_it(server):
    server.ask("FLUSHALL")
    desk = RedisDesk(server)
    one, two = Reader(desk, "one"), Reader(desk, "two")
    for number in range(3):
        one.hears(str(number))
    assert two.hears() == ["0", "1", "2"]
    server.ask("FLUSHALL")
    for number in range(5):  # as many as it had, and more
        one.hears(f"new {number}")
    assert two.hears() == [f"new {number}" for number in range(5)]
    desk.close()


def test_who_posts_hears_what_is_lost_and_whether_it_may_have_run():
    async def story():
        with redis_server() as server:
            store, heard = redis_store(server.url, SystemClock()), []
            while not await held(store, "x"):  # it is connected
                await asyncio.sleep(0.1)
            server.signal(signal.SIGSTOP)
            store.link.post(scripts.HOLDS, ["gw1:x"], [], heard.append)
            while not heard:
                await asyncio.sleep(0.1)
            assert heard == [True]
            while not refused_at_once(store.holds()):
                with contextlib.suppress(StoreUnavailable):
                    await store.holds()
            store.link.post(scripts.HOLDS, ["gw1:x"], [], heard.append)
            assert heard == [True, False]
            server.signal(signal.SIGCONT)
            await store.close()

    asyncio.run(story())


# --- other addresses ------------------------------------------------------------------------------


async def limited(link, clock):
    limiter, plan = Limiter(clock, link, lambda: 1), plan_of(KeyLimits(60, 60, 60, 60))
    taken = await limiter.take(plan, amounts(1.0, 1.0))
    await limiter.renew()
    limiter.settle(taken, amounts(2.0, 3.0))
    await limiter.take(plan, NOTHING)  # a script that the server did not know came last
    again = await limiter.take(plan, amounts(1.0, 1.0))
    return "" if again.shared and used_of(again)[Rule.OUTPUT] > 3.5 else "not limited"


def works(url):
    """Return why a store at a URL does not work; empty: it does."""
    desk, told = Desk(lambda clock: patient_store(url, clock)), ""
    try:
        desk.hold("x")
        told = "" if desk.holds() == {"x": math.inf} else "lost"
        desk.beat("a", "{}", 60)
        desk.tell("log", "word", "a", "{}", 0)
        desk.release(desk.acquire("x", "a"))
        desk.claim_restart("x", "one")
        told += desk.run(limited(desk.store.link, desk.clock))
    except StoreUnavailable as error:
        told = str(error)
    desk.close()
    return told


def test_what_redis_refuses_of_one_key_takes_no_reply_from_another():
    """Else a request would be counted by Redis, and here, where nobody answered."""

    async def story():
        with redis_server() as server:
            server.ask("SET", "gw1:{t:t}:key:spoilt", "by somebody else")
            store = patient_store(server.url, SystemClock())
            limiter = Limiter(SystemClock(), store.link, lambda: 1)
            plans = [plan_of(KeyLimits(100), key) for key in ("spoilt", "sound")]
            await store.link.client.ping()
            async with asyncio.TaskGroup() as group:  # with one round trip
                taking = [group.create_task(limiter.take(plan, amounts())) for plan in plans]
            assert [each.result().shared for each in taking] == [False, True]
            assert store.link.trouble == "it answers with the error WRONGTYPE"
            await store.holds()
            assert not store.trouble
            await store.close()

    asyncio.run(story())


def test_a_socket_and_a_user_of_few_rights_will_do():
    user = (
        "--user gateway on >s3cret ~gw1:* +ping +eval +evalsha +@string +@hash +@sortedset +del +pttl"
        " +pexpire +time"
    )
    with redis_server(*user.split(), "--user", "default", "off") as server:
        assert works(f"unix://gateway:s3cret@{server.socket}") == ""
        assert works(f"redis://gateway:s3cret@127.0.0.1:{server.port}") == ""
        for url in ("gateway:wr0ng@", ""):
            told = works(f"redis://{url}127.0.0.1:{server.port}")
            assert told == "it rejects the user or password"


def test_a_right_that_is_missing_is_found_before_it_is_needed():
    rights = ["+ping", "+eval", "+evalsha", "+@string", "+@hash", "+@sortedset"]
    rights += ["+del", "+pttl", "+pexpire", "+time"]
    for wanted in [*rights, "+@list"]:
        given = [each for each in [*rights, "+@list"] if each != wanted]
        with redis_server("--user", "default", "on", "nopass", "~gw1:*", *given) as server:
            told = {lists: tried(server.url, lists) for lists in (True, False)}
            refused = "its user may not run scripts or use keys that begin with gw1:"
            assert told == {True: refused, False: "" if wanted == "+@list" else refused}


def test_doctor_finds_a_redis_that_drops_keys_by_itself():
    with redis_server("--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru") as server:
        found = asyncio.run(redis_findings(server.url))
        assert [(each.about, each.verdict) for each in found] == [
            ("clock", "ok"),
            ("redis", "wrong"),
        ]
    rights = "on nopass ~gw1:* +ping +eval +evalsha +time"  # it may not ask for its memory
    with redis_server("--user", "default", *rights.split()) as server:
        assert [each.about for each in asyncio.run(redis_findings(server.url))] == ["clock"]


def tried(url, lists):
    async def story():
        store = redis_store(url, SystemClock())
        try:
            async with asyncio.timeout(20):
                while True:  # a busy machine may keep it from answering in time
                    try:
                        await store.try_rights(lists=lists)
                        return ""
                    except StoreUnavailable as error:
                        if "may not" in str(error):
                            return str(error)
                        await asyncio.sleep(0.1)
        finally:
            await store.close()

    return asyncio.run(story())


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (
            ("--user", *["default", "on", "nopass", "~other:*", "+@all"]),
            "its user may not run scripts",
        ),
        (("--maxmemory", "100kb", "--maxmemory-policy", "noeviction"), "its memory is full"),
        (("--replicaof", "127.0.0.1 1", "--replica-serve-stale-data", "yes"), "it is a replica"),
    ],
)
def test_what_is_wrong_with_a_server_is_told_in_words(options, told):
    with redis_server(*options) as server:
        assert works(server.url).startswith(told)


def test_a_server_that_still_loads_its_data_is_told_of_and_used_once_it_has():
    with redis_server("--rdbcompression", "no") as server:
        with server.client() as client:
            client.mset({f"key{number}": "x" * 2000 for number in range(1000)})
            client.save()
        server.kill()
        # Each key takes 50 ms, and calls are answered after each: longer than a busy machine takes to ask.
        server.options = (
            "--key-load-delay",
            "50000",
            "--loading-process-events-interval-bytes",
            "1024",
        )
        server.start()
        assert works(server.url) == "it is still loading its data"
        server.ask("CONFIG", "SET", "key-load-delay", 0)
        deadline = time.monotonic() + 60
        while told := works(server.url):
            assert time.monotonic() < deadline, told


def test_over_tls_the_certificate_is_checked(tmp_path):
    command = (
        "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -keyout key.pem -out cert.pem"
        " -subj /CN=localhost -addext subjectAltName=DNS:localhost"
    )
    subprocess.run(command.split(), cwd=tmp_path, check=True, capture_output=True)
    tls = ["--tls-cert-file", f"{tmp_path}/cert.pem", "--tls-key-file", f"{tmp_path}/key.pem"]
    with redis_server("--tls-port", "0", "--tls-auth-clients", "no", *tls) as server:
        port = free_port()
        with server.client() as client:
            client.config_set("tls-port", port)
        url = f"rediss://localhost:{port}/0"
        assert works(f"{url}?ssl_ca_certs={tmp_path}/cert.pem") == ""
        assert works(url) == "the TLS handshake failed"


def test_a_cluster_and_a_sentinel_lead_to_their_servers():
    bus = f"{free_port()}"  # by itself a port on which others may listen
    with redis_server("--cluster-enabled", "yes", "--cluster-port", bus) as server:
        server.ask("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
        for _ in range(100):  # it takes a moment until it says that it is well
            if "cluster_state:ok" in server.ask("CLUSTER", "INFO"):
                break
            time.sleep(0.1)
        assert works(f"redis+cluster://127.0.0.1:{server.port}") == ""
    with redis_server() as master, redis_server() as replica:
        conf = replica.folder / "sentinel.conf"
        conf.write_text(f"sentinel monitor mymaster 127.0.0.1 {master.port} 1\n")
        with redis_server(str(conf), "--sentinel") as sentinel:
            url = f"redis+sentinel://127.0.0.1:1,127.0.0.1:{sentinel.port}"
            assert works(f"{url}/mymaster") == ""
            assert works(f"{url}/other") == "no Sentinel knows a master of that name"


@contextlib.contextmanager
def gone():
    """The port of a machine that is off: whoever connects gets no answer at all."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(4):  # its queue is full
            waits = stack.enter_context(socket.socket())
            waits.setblocking(False)
            waits.connect_ex(listener.getsockname())
        yield listener.getsockname()[1]


def test_a_sentinel_whose_machine_is_off_leaves_time_to_ask_the_next():
    async def story(master):
        with redis_server() as other, gone() as port:
            conf = other.folder / "sentinel.conf"
            conf.write_text(f"sentinel monitor mymaster 127.0.0.1 {master.port} 1\n")
            with redis_server(str(conf), "--sentinel") as sentinel:
                hosts = f"127.0.0.1:{port},127.0.0.1:{sentinel.port}"
                store = redis_store(f"redis+sentinel://{hosts}/mymaster", SystemClock())
                async with asyncio.timeout(30):
                    while not await held(store, "x"):
                        await asyncio.sleep(0.1)
                await store.close()

    timed(story)


# --- faults ---------------------------------------------------------------------------------------


async def store_at(server):
    return redis_store(server.url, SystemClock())


async def held(store, scope):
    """Hold a scope, and return whether Redis answered in time: the machine may be busy."""
    with contextlib.suppress(StoreUnavailable):
        await store.hold(scope)
        return True
    return False


def timed(story):
    async def run():
        with redis_server() as server:
            await story(server)

    asyncio.run(run())


def refused_at_once(call):
    """Whether a call is refused before it waits for anything."""
    try:
        call.send(None)
    except StoreUnavailable:
        return True
    finally:
        call.close()
    return False


def test_a_server_that_hangs_costs_a_call_its_budget_and_soon_nothing():
    async def story(server):
        store = await store_at(server)
        while not await held(store, "x"):
            await asyncio.sleep(0.1)
        server.signal(signal.SIGSTOP)
        times = []
        while not refused_at_once(store.holds()):
            began = asyncio.get_running_loop().time()
            with pytest.raises(StoreUnavailable):
                await store.holds()
            times.append(asyncio.get_running_loop().time() - began)
        # Three that fail, and one that was given up just before the third did.
        assert len(times) <= 4
        assert min(times) < 2 * BUDGET_S  # a busy machine may wake one up late
        assert store.trouble
        server.signal(signal.SIGCONT)
        async with asyncio.timeout(10):
            while store.trouble:
                await asyncio.sleep(0.1)
                with contextlib.suppress(StoreUnavailable):
                    assert await store.holds() == {"x": math.inf}
        await store.close()

    timed(story)


def test_a_server_that_comes_back_empty_is_used_again():
    async def story(server):
        store = await store_at(server)
        while not await held(store, "x"):
            await asyncio.sleep(0.1)
        server.kill()
        for _ in range(5):
            with pytest.raises(StoreUnavailable):
                await store.acquire("chat", "b")
        assert store.trouble in ("the connection was refused", "it cannot be reached")
        server.start()
        async with asyncio.timeout(10):
            while store.trouble:
                await asyncio.sleep(0.1)
                with contextlib.suppress(StoreUnavailable):
                    await store.acquire("chat", "b")
        await store.close()

    timed(story)


ECHO = scripts.Script("return ARGV[1]")


@pytest.mark.parametrize(
    ("turns", "calls", "latency_s"), [(60, 100, 0.0), (50, 200, 0.05)], ids=["near", "far"]
)
def test_whoever_gives_up_takes_no_other_callers_reply(turns, calls, latency_s):
    async def story(server):
        async with toxic(f"http://127.0.0.1:{server.port}") as proxy:
            store = redis_store(proxy.url.replace("http:", "redis:"), SystemClock())
            with contextlib.suppress(StoreUnavailable):  # the machine may be busy
                await store.holds()  # it is connected
            proxy.down = Toxic(latency_s=latency_s)
            await give_up(store)
            await store.close()

    async def give_up(store):
        loop, wrong, cancelled, answered = asyncio.get_running_loop(), 0, 0, 0

        async def call(number):
            nonlocal wrong
            for each in (f"{number} a", f"{number} b"):
                wrong += await store.link.ask(ECHO, ["{x}"], [each]) != each

        for turn in range(turns):
            tasks = [loop.create_task(call(calls * turn + each)) for each in range(calls)]
            await asyncio.sleep(latency_s * (turn % 3) + 0.0005 * (turn % 7))
            for task in tasks[::2]:
                cancelled += task.cancel()
            await asyncio.wait(tasks)
            for task in tasks[1::2]:
                late = isinstance(task.exception(), StoreUnavailable)  # the machine may be busy
                assert late or task.exception() is None
                answered += not late
        assert wrong == 0
        assert cancelled > 1000
        assert answered > 1000

    timed(story)


# --- the command line ---------------------------------------------------------------------------------


def test_check_tries_the_store_as_serve_would(tmp_path):
    file = tmp_path / "gateway.yaml"

    def check(url):
        file.write_text(
            f"redis: {url}\nkeys: none\npools: {{m: {{backends: ['http://127.0.0.1:1']}}}}\n"
        )
        done = subprocess.run(
            [GATEWAY, "check", file, "--probe"], capture_output=True, text=True, timeout=60
        )
        return done.stdout + done.stderr

    with redis_server() as server:
        assert "redis ok" in check(server.url)
        server.ask("CONFIG", "SET", "requirepass", "s3cret")
        told = check(f"redis://:wr0ng@127.0.0.1:{server.port}/0")
        assert "the Redis does not answer: it rejects the user or password" in told
        assert "[redis-unreachable]" in told
        assert "wr0ng" not in told
    told = check("redis://:wr0ng@h:port/0")
    assert "[bad-url]" in told
    assert "wr0ng" not in told
