"""What the tests share that kill, freeze and drain real servers under streams."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import json
import math
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import httpx2

from tests.e2e.engines import Engine
from tests.e2e.support import MODELS, Gateway, gateway, get, need, wait_until
from tests.e2e.valve import Valve, valve

FROZEN = "10s"  # a server that says nothing for so long is frozen, though it may share two cores with another one

# A seam reads as a prompt what was written token by token, in another batch. That moves logits a little, and
# a random model is often undecided. Where its two best tokens are closer than this, either may follow.
_DECIDED = 1e-3
# A random model writes bytes that are no characters, too. Where many come in a row, vLLM's decoder shows
# them in other portions after a seam.
_NO_TEXT = "\ufffd" * 3


def lora_flags() -> list[str]:
    """Return the flags of the servers that most of these tests share."""
    adapter = need(MODELS / "lora-a", "the adapter lora-a")
    return ["--enable-lora", "--max-lora-rank", "8", "--lora-modules", f"lora-a={adapter}"]


@contextlib.contextmanager
def behind_a_gateway(
    folder, engines: list[Engine], *, stall: str = "100s", **pools: dict[str, object]
) -> Iterator[tuple[Gateway, Valve]]:
    """Run a gateway in front of real servers, and a valve in front of the first of them.

    Held streams say nothing, too: `stall` has to be longer than they are held, unless their server is to freeze.
    """
    folder.mkdir(exist_ok=True)
    with valve(engines[0].port) as first:
        pool = {
            "backends": [first.url, *(each.url for each in engines[1:])],
            "slow_start": "0s",
            "served_model": "tiny",
        }
        made = {name: pool | more for name, more in (pools or {"tiny": {}}).items()}
        extra = f"timeouts: {{first_byte: 60s, stall: {stall}}}\n"
        with gateway(folder, "pools: " + json.dumps(made), extra) as gate:
            wait_until(lambda: all_ready(gate), 120, "all servers take requests")
            yield gate, first


@dataclass
class Told:
    """What a stream told its client."""

    text: str = ""
    usage: dict[str, object] | None = None
    finish: str | None = None
    done: bool = False
    error: str | None = None
    decided: str | None = None  # the text up to where the model was undecided; None: nobody looked
    ids: set[tuple[str, int]] = field(default_factory=set)
    reasoning: str = ""

    @property
    def whole(self) -> bool:
        """Whether it came to a good end."""
        return self.done and self.error is None and self.finish is not None

    def take(self, chunk: dict[str, object]) -> None:
        """Take one frame."""
        if "error" in chunk:
            self.error = chunk["error"]["message"]
            return
        self.ids.add((chunk["id"], chunk["created"]))
        self.usage = chunk.get("usage") or self.usage
        for choice in chunk["choices"]:
            assert choice.get("token_ids") is None
            if self.decided is None and not _is_decided(choice.get("logprobs")):
                self.decided = self.text
            said = choice.get("delta", choice)
            self.text += said.get("content") or said.get("text") or ""
            self.reasoning += said.get("reasoning") or ""
            self.finish = choice["finish_reason"] or self.finish


def _is_decided(logprobs: dict[str, object] | None) -> bool:
    if not logprobs:
        return True
    if "content" in logprobs:
        bests = [
            [each["logprob"] for each in token["top_logprobs"]] for token in logprobs["content"]
        ]
    else:
        bests = [list(token.values()) for token in logprobs["top_logprobs"]]
    return all(len(best) >= 2 and best[0] - best[1] > _DECIDED for best in map(_best_first, bests))


def _best_first(logprobs: Iterable[float]) -> list[float]:
    return sorted(logprobs, reverse=True)


def client(gate: Gateway) -> httpx2.AsyncClient:
    """Return a client of the gateway for many streams at once."""
    return to(gate.url, {"authorization": f"Bearer {gate.key}"})


def to(url: str, headers: dict[str, str] | None = None) -> httpx2.AsyncClient:
    """Return a client for many streams at once."""
    limits = httpx2.Limits(max_connections=100)
    return httpx2.AsyncClient(
        base_url=url, headers=headers, timeout=120, limits=limits, trust_env=False
    )


async def read(
    http, path: str, body: dict[str, object], begun: asyncio.Event | None = None
) -> Told:
    """Return what a stream tells; `begun` is set at its first text, or its end."""
    told = Told()
    try:
        async with http.stream("POST", path, json=body) as reply:
            assert reply.status_code == 200, await reply.aread()
            async for line in _lines(reply):
                if line == "data: [DONE]":
                    told.done = True
                elif line.startswith("data: "):
                    told.take(json.loads(line[6:]))
                if begun is not None and (told.text or told.reasoning):
                    begun.set()
    finally:
        if begun is not None:
            begun.set()
    assert len(told.ids) == 1
    return told


async def _lines(reply) -> AsyncIterator[str]:
    """Yield the lines of a stream; httpx would also split at characters that JSON may hold as they are."""
    held = b""
    async for data in reply.aiter_bytes():
        *lines, held = (held + data).split(b"\n")
        for line in lines:
            yield line.decode()


Asked = dict[int, tuple[str, dict[str, object]]]  # path and body, by number


def chat(content: str, max_tokens: int, **more: object) -> tuple[str, dict[str, object]]:
    """Return the path and the body of a streamed chat that ends by its length."""
    return "/v1/chat/completions", {
        "model": "tiny",
        "messages": [{"role": "user", "content": content}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": max_tokens,
        "ignore_eos": True,
        **more,
    }


async def undisturbed(engine: Engine, asked: Asked) -> dict[int, Told]:
    """Return what an engine answers greedy requests with, all at once, and up to where it was decided."""

    def with_logprobs(path: str, body: dict[str, object]) -> dict[str, object]:
        chat = {"logprobs": True, "top_logprobs": 2}
        return body | (chat if "chat" in path else {"logprobs": 2})

    async with to(engine.url) as http, asyncio.TaskGroup() as group:
        tasks = {
            number: group.create_task(read(http, path, with_logprobs(path, body)))
            for number, (path, body) in asked.items()
            if body["temperature"] == 0
        }
    found = {number: task.result() for number, task in tasks.items()}
    assert all(told.whole for told in found.values()), found
    return found


async def disturbed(
    gate: Gateway, first: Valve, asked: Asked, disturb: Callable[[], object]
) -> dict[int, Told]:
    """Return the answers to all requests; `disturb` is called once all began, and the first server's are held."""
    async with client(gate) as http, asyncio.TaskGroup() as group:
        begun = {number: asyncio.Event() for number in asked}
        tasks = {
            number: group.create_task(read(http, path, body, begun[number]))
            for number, (path, body) in asked.items()
        }
        for each in begun.values():
            await each.wait()
        async with asyncio.timeout(120):
            while first.streams_passing:
                await asyncio.sleep(0.05)
        disturb()
    return {number: task.result() for number, task in tasks.items()}


def as_expected(told: Told, expected: Told) -> bool:
    """Whether a stream told what an undisturbed one had told, as far as that is certain."""
    certain = expected.text if expected.decided is None else expected.decided
    certain = certain.partition(_NO_TEXT)[0]
    if certain == expected.text:
        return told.whole and told.text == expected.text and told.usage == expected.usage
    return told.text.startswith(certain) or (not told.whole and certain.startswith(told.text))


def check_greedy(answers: dict[int, Told], expected: dict[int, Told]) -> None:
    """Each greedy stream told what it tells undisturbed, and came to its end where the model was decided."""
    compared = answers.keys() & expected.keys()
    assert compared
    wrong = {
        number: (answers[number], expected[number])
        for number in compared
        if not as_expected(answers[number], expected[number])
    }
    assert not wrong, wrong


def check_ends(
    gate: Gateway,
    answers: dict[int, Told],
    *barriers: str,
    expected: Mapping[int, Told] = MappingProxyType({}),
) -> None:
    """At least 95 % of those that can go on came to a good end, and each other one says that it did not.

    A busy server puts several tokens into one frame. If that was the last one before the failure, nobody can tell
    whether it ends within a character, and what was drawn by chance does not go on. So these are not counted
    (`seam`), nor those behind other `barriers`. Where the model was undecided in what is `expected`, another
    server may choose otherwise, and what the client was shown is not said again (`strayed`).
    """
    wait_until(lambda: len(access_lines(gate)) >= len(answers), 30, "the access log tells of all")
    why = unresumed(gate)
    chance = "".join(
        answers[each].error or "" for each in expected if expected[each].decided is not None
    )
    strayed = sum(
        line["not_resumed"] == "strayed" and line["id"] in chance for line in access_lines(gate)
    )
    can_go_on = len(answers) - strayed - sum(why[each] for each in ("seam", *barriers))
    ended = sum(told.whole for told in answers.values())
    assert ended >= math.ceil(0.95 * can_go_on), (why, [told.error for told in answers.values()])
    assert all(told.error for told in answers.values() if not told.whole)


def unresumed(gate: Gateway) -> collections.Counter[str]:
    """Return why streams that broke off were not gone on with, by the access log so far."""
    return collections.Counter(
        line["not_resumed"] for line in access_lines(gate) if line["not_resumed"] is not None
    )


def stayed(gate: Gateway) -> int:
    """Return how many streams of the first server ended where they were, by the access log so far.

    Where its valve holds a stream, the last tokens may have come together in one frame: then all was told.
    """
    return sum((line["backend"], line["outcome"]) == ("b1", "ok") for line in access_lines(gate))


def access_lines(gate: Gateway) -> list[dict[str, object]]:
    """Return what the access log tells so far; it is written shortly after a request has ended."""
    whole, _, _ = gate.log.read_text().rpartition("\n")  # the last line may be half written
    lines = (json.loads(line) for line in whole.splitlines() if line.startswith("{"))
    return [line for line in lines if line["event"] == "request"]


def all_ready(gate: Gateway) -> bool:
    """Whether all servers take requests."""
    pools = json.loads(get(gate.admin_url + "/admin/v1/overview", timeout=30)[1])["pools"]
    return all(each["phase"] == "ready" for pool in pools for each in pool["backends"])


def in_flight(gate: Gateway) -> list[int]:
    """Return how many requests each server of the first pool works on."""
    pool, *_ = json.loads(get(gate.admin_url + "/admin/v1/overview", timeout=30)[1])["pools"]
    return [each["in_flight"] for each in pool["backends"]]


def resumed(gate: Gateway, cause: str = "") -> float:
    """Return how often another server went on with a stream."""
    return sum(
        float(line.rpartition(" ")[2])
        for line in gate.metrics().splitlines()
        if line.startswith("gateway_streams_resumed_total{") and cause in line
    )
