"""The routing study over sockets: this gateway beside real routers, before the same simulated engines.

    python -m loadtest.routing_sockets --out FILE [--traces ...] [--arms ...] [--backends 4] [--seconds 40]
        [--speed 0.5] [--load 0.7] [--vllm-router PATH] [--sglang-router PATH]

Every arm gets the same sessions at the same moments, one arm after the other, with caches emptied in
between. Routers are as shipped but for their policy. Hit rates are read from the engines' own counters.
Simulated time runs at `--speed` of ours, so that this client and the engines keep up on one core; all
figures are in simulated time. The machine must be quiet otherwise.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import os
import pathlib
import tempfile
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any, Final

from loadtest.arms import Address, Backends, KeyFolder, simulated
from loadtest.harness import BIN, GATEWAY_CORE, LOAD_CORE, free_port, process, wait_for
from loadtest.openloop import parse_head, scrape
from loadtest.outcomes import End, Outcome
from loadtest.routing import figures
from loadtest.routing_table import report
from loadtest.routing_traces import NAMES, Asked, Trace, trace
from loadtest.routing_virtual import ENGINE

ARMS: Final = (
    "gateway",
    "by load",
    "vllm-router cache_aware",
    "vllm-router consistent_hash",
    "sglang-router cache_aware",
    "least load (client)",
)
_POOLS: Final = {"gateway": "", "by load": "    prefix: off\n"}
_WARM_SHARE: Final = 1 / 3
_LONGEST_S: Final = 30.0  # after the last arrival; what still runs then is cut
_CONTENT: Final = b'"content":"'
_TOLD: Final = ("num_blocks", "max_batched_tokens", "max_model_len", "max_num_seqs", "decode_step_s", "prefill_tokens_per_s", "context_token_s")  # fmt: skip


class Client:
    """Sends the requests of sessions, each on a connection of its own; times are simulated seconds."""

    def __init__(self, doors: Sequence[Address], key: str, speed: float) -> None:
        self.outcomes: list[Outcome] = []
        self._doors, self._key, self._speed = doors, key, speed
        self._open: Counter[Address] = Counter()
        self._loop = asyncio.get_running_loop()
        self._start = self._loop.time()

    def now(self) -> float:
        """Return how long ago the first session could begin."""
        return (self._loop.time() - self._start) * self._speed

    async def until(self, at_s: float) -> None:
        """Sleep until then."""
        await asyncio.sleep(max(0.0, at_s - self.now()) / self._speed)

    async def session(self, requests: Sequence[Asked]) -> None:
        """Ask one request after the other, with the replies that came."""
        due_s, replies = requests[0].at_s, dict[int, str]()
        for asked in requests:
            due_s += asked.after_s
            await self.until(due_s)
            outcome = Outcome(asked, due_s)
            self.outcomes.append(outcome)
            texts = [
                (role, replies[parts[0].number] if role == "assistant" else text)
                for (role, parts), (_, text) in zip(asked.messages, asked.texts(), strict=True)
            ]
            reply = await self._send(asked, asked.body(texts), outcome)
            if reply is None:
                return
            replies[asked.reply.number] = reply
            due_s = self.now()

    async def _send(self, asked: Asked, body: bytes, outcome: Outcome) -> str | None:
        """Return the text of a whole reply."""
        door = min(self._doors, key=self._open.__getitem__)
        self._open[door] += 1
        writer = None
        try:
            reader, writer = await asyncio.open_connection(*door)
            outcome.sent_s = self.now()
            writer.write(self._head(asked, len(body)) + body)
            raw = bytearray()
            while data := await reader.read(1 << 16):
                raw += data
                if outcome.first_s is None and _CONTENT in raw and _has_token(raw):
                    outcome.first_s = self.now()
            return self._judge(bytes(raw), outcome)
        except OSError as error:
            outcome.end, outcome.reason = End.FAILED, type(error).__name__
            return None
        finally:
            self._open[door] -= 1
            if writer is not None:
                writer.close()

    def _head(self, asked: Asked, size: int) -> bytes:
        session = f"x-session-id: {asked.session}\r\n" if asked.session else ""
        return (
            "POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n"
            f"authorization: Bearer {self._key}\r\n{session}"
            f"content-type: application/json\r\ncontent-length: {size}\r\n\r\n"
        ).encode()

    def _judge(self, raw: bytes, outcome: Outcome) -> str | None:
        head, _, rest = raw.partition(b"\r\n\r\n")
        if not head:
            outcome.end = End.FAILED
            return None
        outcome.status, headers = parse_head(head)
        body = _unchunked(rest) if "chunked" in headers.get("transfer-encoding", "") else rest
        if outcome.status != 200 or b"data: [DONE]" not in body:
            outcome.end = End.REFUSED if outcome.status in (429, 503) else End.FAILED
            outcome.reason = f"{outcome.status} {body[:200]!r}"
            return None
        outcome.end, outcome.ended_s = End.COMPLETE, self.now()
        frames = (line[6:] for line in body.split(b"\n") if line.startswith(b"data: {"))
        choices = (choice for frame in frames for choice in json.loads(frame)["choices"])
        return "".join(choice["delta"].get("content") or "" for choice in choices)


def _has_token(raw: bytes | bytearray) -> bool:
    """Whether a delta with text has come; the first one, with the role, has none."""
    at = raw.find(_CONTENT)
    while at >= 0:
        if raw[at + len(_CONTENT) : at + len(_CONTENT) + 1] not in (b'"', b""):
            return True
        at = raw.find(_CONTENT, at + 1)
    return False


def _unchunked(data: bytes) -> bytes:
    found, at = [], 0
    while (end := data.find(b"\r\n", at)) > 0:
        size = int(data[at:end].split(b";")[0], 16)
        found.append(data[end + 2 : end + 2 + size])
        at = end + 2 + size + 2
        if not size:
            break
    return b"".join(found)


async def measure(planned: Trace, doors: Sequence[Address], key: str, backends: Backends, speed: float) -> dict[str, Any]:  # fmt: skip
    """Play a trace; return its figures, with the hit rate that the engines tell."""
    client = Client(doors, key, speed)
    warm_s = planned.seconds * _WARM_SHARE
    before: list[dict[str, float]] = []

    async def look() -> None:
        await client.until(warm_s)
        before.extend([await scrape(each) for each in backends.addresses])

    async def forget() -> None:
        if planned.forgets_s is not None:
            await client.until(planned.forgets_s)
            await asyncio.to_thread(reset, backends.addresses[0], preempt=True)

    async with asyncio.TaskGroup() as group:
        group.create_task(look())
        group.create_task(forget())
        tasks = []
        for requests in planned.sessions:
            await client.until(requests[0].at_s)
            tasks.append(group.create_task(client.session(requests)))
        await client.until(planned.seconds)
        _, running = await asyncio.wait(tasks, timeout=_LONGEST_S / speed)
        for task in running:
            task.cancel()
    after = [await scrape(each) for each in backends.addresses]
    queries, hits = (
        [now[name] - then[name] for now, then in zip(after, before, strict=True)]
        for name in ("vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total")
    )
    found = figures(client.outcomes, (warm_s, planned.seconds), len(backends.addresses))
    found["hit_ratio"] = sum(hits) / max(1.0, sum(queries))
    found["spread"] = max(queries) * len(queries) / max(1.0, sum(queries))  # of tokens asked
    found["late_p99_s"] = _late(client.outcomes)
    return found | {"failures": Counter(each.reason for each in client.outcomes if each.reason)}


def _late(outcomes: Sequence[Outcome]) -> float:
    """Return by how much the client itself sent too late, at the 99th percentile."""
    late = sorted(each.sent_s - each.planned_s for each in outcomes if each.sent_s is not None)
    return late[int(0.99 * len(late))] if late else 0.0


def reset(address: Address, *, preempt: bool = False) -> None:
    """Empty the prefix cache of an engine. Raises RuntimeError when it does not."""
    query = "?reset_running_requests=true" if preempt else ""
    url = f"http://{address[0]}:{address[1]}/reset_prefix_cache{query}"
    with urllib.request.urlopen(urllib.request.Request(url, method="POST"), timeout=10) as reply:
        if not json.load(reply)["success"]:
            raise RuntimeError("the prefix cache was not emptied: requests still run")


@contextlib.contextmanager
def entrance(arm: str, backends: Backends, keys: KeyFolder, tools: dict[str, str]) -> Iterator[list[Address]]:  # fmt: skip
    """Start what stands before the engines in one arm, with a fresh process for each trace."""
    if arm == "least load (client)":
        yield backends.addresses
        return
    port, admin = free_port(), free_port()
    if arm in _POOLS:
        urls = "".join(f"      - {url}\n" for url in backends.urls)
        config = keys.folder / "routing.yaml"
        pool = f"pools:\n  {backends.model}:\n    backends:\n{urls}{_POOLS[arm]}"
        config.write_text(keys.head(port, admin) + pool)
        command, ready = [str(BIN / "vllm-gateway"), "serve", "-c", str(config)], "/readyz"
    else:
        router, policy = arm.split()
        command = [
            *(*tools[router].split(), "--host", "127.0.0.1", "--port", str(port)),
            *("--policy", policy, "--log-level", "warn" if "sglang" in router else "warning"),
            *("--prometheus-port", str(admin), "--worker-urls", *backends.urls),
        ]
        ready = "/health"
    log = keys.folder / f"{arm.replace(' ', '-')}.log"
    with process(command, GATEWAY_CORE, log=str(log)):
        try:
            wait_for(port, ready)
        except OSError:
            raise SystemExit(f"{arm} did not start:\n{log.read_text()[-2000:]}") from None
        yield [("127.0.0.1", port)]


def main() -> None:
    """Run the command line."""
    args = parser().parse_args()
    tools = {"vllm-router": args.vllm_router, "sglang-router": args.sglang_router}
    engine = {name: asdict(ENGINE)[name] for name in _TOLD} | {"speed": args.speed, "dev_mode": True}  # fmt: skip
    os.sched_setaffinity(0, {LOAD_CORE})
    cells: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder, simulated(args.backends, engine) as backends:
        keys = KeyFolder(pathlib.Path(folder), ["t0"])
        for name in args.traces:
            planned = trace(name, args.backends, args.seconds, args.seed, args.load)
            for arm in args.arms:
                for address in backends.addresses:
                    reset(address, preempt=True)
                gc.collect()
                with entrance(arm, backends, keys, tools) as doors:
                    found = asyncio.run(measure(planned, doors, keys.keys["t0"], backends, args.speed))  # fmt: skip
                place = {"trace": name, "backends": args.backends, "seed": args.seed, "arm": arm}
                cells.append(place | {"load": args.load} | found)
                args.out.write_text(json.dumps(cells, indent=1) + "\n")
                print(json.dumps(cells[-1]), flush=True)
    print(report(cells))


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    top = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    top.add_argument("--out", type=pathlib.Path, required=True, help="keep the cells as JSON")
    top.add_argument("--traces", nargs="+", default=[*NAMES], choices=NAMES)
    top.add_argument("--arms", nargs="+", default=[*ARMS], choices=ARMS)
    top.add_argument("--backends", type=int, default=4)
    top.add_argument("--seconds", type=float, default=40.0, help="of arrivals, simulated")
    top.add_argument("--speed", type=float, default=0.5)
    top.add_argument("--load", type=float, default=0.7, help="times the rate of each trace")
    top.add_argument("--seed", type=int, default=1)
    top.add_argument("--vllm-router", default="vllm-router", help="its command")
    top.add_argument("--sglang-router", default="sglang-router launch", help="its command")
    return top


if __name__ == "__main__":
    main()
