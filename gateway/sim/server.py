"""A simulated vLLM server: the real one's paths, replies and habits, without a model.

    async with SimServer(SimConfig(model="m", adapters=("a",))) as sim:
        sim.url, sim.port            where it listens (loopback; port 0 picks a free one)
        sim.inject("reset_after:3")  see `faults` for the table; `sim.clear()` heals everything
        sim.requests                 what came in, headers and bodies, and what became of it
        sim.on_ended                 called with each of them when it ends, however it does

Besides vLLM's own it serves GET /sim/requests, GET|POST|DELETE /sim/faults (POST takes
`{"fault": "name:arg@count"}`).
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import sys
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, Self

from gateway.sim import adapters, audio, tasks, vectors
from gateway.sim.ask import COUNT_TOKENS, MESSAGES
from gateway.sim.config import SimConfig
from gateway.sim.engine import Engine
from gateway.sim.errors import SimError, engine_dead, stopping, wrong_method
from gateway.sim.faults import Fault
from gateway.sim.forms import parse_body, read_json
from gateway.sim.frames import compact
from gateway.sim.generate import EVENT_STREAM, GENERATING, JSON, generate
from gateway.sim.http import Connection, Received, Reply
from gateway.sim.listener import accept, bind, leave, tls_of
from gateway.sim.metrics import CONTENT_TYPE, render_metrics
from gateway.sim.state import SimState

__all__ = ["Fault", "SimConfig", "SimServer", "run"]

_REMEMBERED: Final = 2_000  # requests kept for assertions
_COMMENT_EVERY_S: Final = 0.05
_GUARDED: Final = ("/v1", "/v2")
_HTML: Final = b"<html><head><title>Bad Gateway</title></head><body>Bad Gateway</body></html>\n"

_JsonTask = Callable[[dict[str, Any], SimState], dict[str, Any]]
_JSON_TASKS: Final[dict[str, _JsonTask]] = {
    COUNT_TOKENS: tasks.count_tokens,
    **vectors.TASKS,
    "/tokenize": tasks.tokenize_body,
    "/detokenize": tasks.detokenize_body,
}
_TOKENIZER_INFO: Final = "/tokenizer_info"
_GETS: Final = ("/health", "/version", "/metrics", "/load", "/ping", "/v1/models", "/openapi.json")


class SimServer:
    """One server. Many may live in one event loop; all are made and stopped inside it."""

    def __init__(self, config: SimConfig | None = None, faults: Sequence[Fault | str] = ()) -> None:
        self.config = config or SimConfig()
        self.requests: deque[Received] = deque(maxlen=_REMEMBERED)
        self.on_ended: Callable[[Received], None] = lambda request: None
        self.port = self.config.port
        self._tls = tls_of(self.config)
        self.state: SimState
        self._first_faults = faults
        self._socket: socket.socket | None = None
        self._listening = False
        self._connections: set[Connection] = set()
        self._accepting: set[asyncio.Task[Any]] = set()
        self._death: asyncio.TimerHandle | None = None

    @property
    def url(self) -> str:
        """Where it is, without a path."""
        config = self.config
        scheme = "http" if self._tls is None else "https"
        return f"unix:{config.uds}" if config.uds else f"{scheme}://{config.host}:{self.port}"

    @property
    def engine(self) -> Engine:
        """The (first) engine core."""
        return self.state.engines[0]

    def received(self, path: str) -> list[Received]:
        """Return the remembered requests for one path."""
        return [request for request in self.requests if request.path == path]

    async def start(self) -> None:
        """Bind and listen."""
        self.state = SimState(self.config)
        self.state.on_death = self._plan_end
        self._listen()
        for fault in self._first_faults:
            self.inject(fault)

    async def stop(self) -> None:
        """Close everything at once; requests in progress are cancelled."""
        if self._death is not None:
            self._death.cancel()
        self._close_listener()
        if self._socket is not None:
            leave(self._socket, self.config.uds)
            self._socket = None
        while self._accepting:  # those that come in at this moment end with the others
            await asyncio.wait(self._accepting)
        pending = [c.task for c in self._connections if c.task is not None]
        for connection in list(self._connections):
            connection.transport.abort()
        for driver in self.state.drivers:
            driver.close()
        if pending:
            await asyncio.wait(pending)
        await asyncio.sleep(0)  # lets the transports finish closing

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.stop()

    def inject(self, fault: Fault | str) -> None:
        """Make a fault happen from now on."""
        fault = Fault.parse(fault) if isinstance(fault, str) else fault
        self.state.faults.add(fault)
        if fault.name == "frozen":
            for driver in self.state.drivers:
                driver.freeze(frozen=True)
        elif fault.name == "refuse":
            self._refuse()

    def clear(self) -> None:
        """Forget all faults and heal what they did: thaw, restart a dead engine, listen again."""
        self.state.faults.clear()
        self.state.revive()
        for driver in self.state.drivers:
            driver.freeze(frozen=False)
        if self._death is not None:
            self._death.cancel()
        if not self._listening:
            self._listen()

    # --- listening ---

    def _bind(self) -> socket.socket:
        config = self.config
        sock = bind(config.host, self.port, config.uds)
        if config.uds is None:
            self.port = sock.getsockname()[1]
        return sock

    def _listen(self) -> None:
        self._socket = self._socket or self._bind()
        self._socket.listen(1024)
        self._listening = True
        asyncio.get_running_loop().add_reader(self._socket, self._accept)

    def _close_listener(self) -> None:
        if self._listening and self._socket is not None:
            asyncio.get_running_loop().remove_reader(self._socket)
            leave(self._socket, self.config.uds)
            self._socket = None
        self._listening = False

    def _refuse(self) -> None:
        """Keep the port, but refuse connections; those in use end with their present request."""
        self._close_listener()
        self._socket = self._socket or self._bind()
        for connection in list(self._connections):
            connection.drain()

    def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while self._socket is not None and (sock := accept(self._socket)) is not None:
            accepted = loop.connect_accepted_socket(self._connection, sock, ssl=self._tls)
            task = loop.create_task(accepted)
            self._accepting.add(task)
            task.add_done_callback(self._accepted)

    def _accepted(self, task: asyncio.Task[Any]) -> None:
        self._accepting.discard(task)
        failed = task.cancelled() or task.exception() is not None  # a TLS handshake may fail
        if not failed and not self._listening:  # it came in as connections began to be refused
            task.result()[1].drain()

    def _connection(self) -> Connection:
        return Connection(self._handle, self._connections, self.config.keep_alive_s)

    def _plan_end(self) -> None:
        loop = asyncio.get_running_loop()
        self._death = loop.call_later(self.config.death_linger_s, self._refuse)

    # --- answering ---

    async def _handle(self, request: Received, reply: Reply) -> None:
        try:
            if request.path.startswith("/sim/"):
                self._control(request, reply)
                return
            self.requests.append(request)
            self._check_key(request)
            if request.path in _GETS or request.path == _TOKENIZER_INFO:
                await self._get(request, reply)
            else:
                await self._post(request, reply)
        except SimError as error:
            body = error.body(anthropic=request.path.startswith(MESSAGES), newer=self.config.newer)
            extra = {"allow": error.allow} if error.allow else {}
            reply.send(error.status, compact(body), JSON | extra)
        finally:
            self.on_ended(request)

    def _check_key(self, request: Received) -> None:
        key = self.config.api_key
        if key is None or not request.path.startswith(_GUARDED):
            return
        scheme, _, given = (request.header("authorization") or "").partition(" ")
        if scheme.lower() != "bearer" or given != key:
            raise SimError(401, "", plain={"error": "Unauthorized"})

    async def _get(self, request: Received, reply: Reply) -> None:
        if request.method != "GET":
            raise wrong_method("GET")
        state = self.state
        match request.path:
            case "/health" | "/ping":
                reply.send(self._health(), b"")
            case "/metrics":
                await self._metrics(reply)
            case "/version":
                reply.send(200, compact({"version": self.config.version}), JSON)
            case "/load":
                reply.send(200, compact({"server_load": state.in_flight}), JSON)
            case "/v1/models":
                reply.send(200, compact(tasks.list_models(state)), JSON)
            case "/tokenizer_info":
                if request.path not in self.config.paths:
                    raise SimError(404, "", plain={"detail": "Not Found"})
                reply.send(200, compact(tasks.tokenizer_info(state)), JSON)
            case _:
                reply.send(200, compact(tasks.openapi(self.config)), JSON)

    def _health(self) -> int:
        if self.state.faults.take("health_500"):
            return 500
        return 503 if self.state.dead or self.state.faults.take("unhealthy_then_ok") else 200

    async def _metrics(self, reply: Reply) -> None:
        faults = self.state.faults
        if slow := faults.take("slow_metrics"):
            await asyncio.sleep(slow.duration_s or 0)
        if faults.take("no_metrics"):
            raise SimError(404, "", plain={"detail": "Not Found"})
        garbage = faults.take("garbage_metrics")
        body = b"\x00<html>}{ vllm:num_requests_running{ NaN\n" if garbage else None
        reply.send(200, body or render_metrics(self.state), {"content-type": CONTENT_TYPE})

    async def _post(self, request: Received, reply: Reply) -> None:
        path = request.path
        if path == tasks.RESET_CACHE and self.config.dev_mode:
            preempt = "reset_running_requests=true" in request.query
            reply.send(200, compact(tasks.reset_cache(self.state, preempt=preempt)), JSON)
            return
        if path not in self.config.paths and path not in adapters.PATHS:
            raise SimError(404, "", plain={"detail": "Not Found"})
        if request.method != "POST":
            raise wrong_method("POST")
        if path in adapters.PATHS:
            said = await adapters.order(path, read_json(request), self.state)
            reply.send(200, said.encode())
            return
        if await self._broken_before(request, reply):
            return
        if path in audio.PATHS:
            await audio.answer(request, self.state, reply)
        elif path in GENERATING:
            await generate(self.state, request, reply, read_json(request))
        elif path in vectors.ENCODED:
            await vectors.send(vectors.vectors(path, read_json(request), self.state), reply)
        else:
            if self.state.dead and path.startswith("/v1"):
                raise engine_dead()
            reply.send(200, compact(_JSON_TASKS[path](read_json(request), self.state)), JSON)

    async def _broken_before(self, request: Received, reply: Reply) -> bool:
        """Carry out a fault that hits before any answer; True when that was the answer."""
        faults = self.state.faults
        if request.reused and faults.take("keepalive_close"):
            reply.cut()
            return True
        if hang := faults.take("hang_before_headers"):
            if hang.duration_s is None:
                await asyncio.Event().wait()
            await asyncio.sleep(hang.duration_s or 0)
        if faults.take("reset_before_headers"):
            reply.reset()
            return True
        if failing := faults.take("http_500"):
            status = failing.number or 500
            raise SimError(status, "Internal server error", kind="InternalServerError")
        if faults.take("stopping"):
            raise stopping()
        if page := faults.take("html_error"):
            reply.send(page.number or 502, _HTML, {"content-type": "text/html"})
            return True
        if faults.take("only_comments"):
            reply.start_stream(EVENT_STREAM)
            while True:
                await reply.chunk(b": keep-alive\n\n")
                await asyncio.sleep(_COMMENT_EVERY_S)
        return False

    def _control(self, request: Received, reply: Reply) -> None:
        if request.path == "/sim/requests":
            answer: Any = [one.shown() for one in self.requests]
        elif request.path == "/sim/faults":
            if request.method == "POST":
                try:
                    self.inject(str(parse_body(request.body).get("fault")))
                except ValueError as error:
                    raise SimError(400, str(error)) from None
            elif request.method == "DELETE":
                self.clear()
            answer = [str(fault) for fault in self.state.faults.active]
        else:
            raise SimError(404, "", plain={"detail": "Not Found"})
        reply.send(200, compact(answer), JSON)


def run(config: SimConfig, faults: Sequence[Fault | str] = ()) -> None:
    """Serve until SIGINT or SIGTERM."""

    async def serve() -> None:
        ended = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, ended.set)
        async with SimServer(config, faults) as server:
            sys.stderr.write(f"simulated vLLM serves {config.model} on {server.url}\n")
            await ended.wait()

    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve())
