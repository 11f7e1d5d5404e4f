"""The generating endpoints: check, queue in the engine, write tokens as they come, or break."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Any, Final

from gateway.sim.ask import CHAT, CHAT_BATCH, COMPLETIONS, MESSAGES, RESPONSES, Ask, parse_ask
from gateway.sim.driver import DIED, Driver
from gateway.sim.errors import ENGINE_DEAD, SimError, busy, engine_dead
from gateway.sim.events import MessagesWriter, ResponsesWriter
from gateway.sim.faults import CUTS, Fault
from gateway.sim.frames import ChatWriter, CompletionsWriter, Head, Writer, compact
from gateway.sim.http import Received, Reply
from gateway.sim.newer import NewerWriter
from gateway.sim.plan import Piece, Plan, plan_reply
from gateway.sim.sequence import Emitted, Sequence
from gateway.sim.state import SimState

GENERATING: Final = (CHAT, CHAT_BATCH, COMPLETIONS, RESPONSES, MESSAGES)
JSON: Final = {"content-type": "application/json"}
EVENT_STREAM: Final = {"content-type": "text/event-stream; charset=utf-8"}
_READ_TIME_S: Final = 0.01  # lets the client read what came before a reset


@dataclass(slots=True)
class _Run:
    """One request in the engine: a sequence for each choice, all feeding one queue."""

    driver: Driver
    plans: dict[str, Plan]
    sink: asyncio.Queue[Emitted | None]
    cut: Fault | None
    tells_cache: bool
    head: Head

    def submit(self, ask: Ask, adapter_path: str) -> None:
        for sequence_id, plan in self.plans.items():
            sequence = Sequence(
                id=sequence_id,
                prompt=plan.prompt,
                output=plan.tokens,
                finish="length" if plan.finish == "length" else "stop",
                adapter=ask.adapter,
                salt=f"{adapter_path}\0{ask.cache_salt}",
                ttft_s=ask.control.ttft_s,
                itl_s=ask.control.itl_s,
            )
            self.driver.submit(sequence, self.sink)

    def abort(self) -> None:
        for sequence_id in self.plans:
            self.driver.abort(sequence_id)

    async def pieces(self) -> AsyncIterator[Piece]:
        """Give every token until all choices are finished."""
        open_choices = len(self.plans)
        while open_choices:
            event = await self.sink.get()
            if event is DIED:
                raise engine_dead()
            plan = self.plans[event.id]
            finish = plan.finish if event.finish else None
            open_choices -= finish is not None
            text = plan.pieces[event.position]
            cache = event.cache if self.tells_cache else None
            yield Piece(plan, event.position, text, event.token, finish, cache)


async def generate(state: SimState, request: Received, reply: Reply, body: dict[str, Any]) -> None:
    """Answer one request. Raises SimError before anything was sent.

    Cancel: the engine forgets the request at once.
    """
    ask = parse_ask(request.path, body, state.config, list(state.adapters))
    request.begun_tokens = ask.begun_tokens
    _admit(state, ask)
    chosen = uuid.uuid4().hex[:16]  # engine ids are unique even when clients repeat theirs
    head = Head(ask, _reply_id(request, ask, chosen), int(time.time()), state.fingerprint)
    writer = _writer(head, request.path, newer=state.config.newer)
    plans = plan_reply(ask, state.config.reply_tokens)
    cut = state.faults.take(*CUTS)
    by_id = {f"{chosen}/{plan.index}": plan for plan in plans}
    tells_cache = state.config.prompt_tokens_details or request.path == RESPONSES
    run = _Run(_driver(state, request), by_id, asyncio.Queue(), cut, tells_cache, head)
    try:
        run.submit(ask, state.adapters.get(ask.adapter or "", ""))
        poison = state.faults.find("die_on_prompt")
        if poison is not None and str(poison.arg) in ask.text:
            state.die()
        if ask.stream:
            await _stream(run, writer, request, reply, ask.stream_interval)
        else:
            await _whole(run, writer, request, reply)
    finally:
        run.abort()


def _driver(state: SimState, request: Received) -> Driver:
    """Return the engine that the request names, where its endpoint lets it, or the least loaded one."""
    named = request.header("x-data-parallel-rank") if request.path != RESPONSES else None
    if named is None or not named.strip().isdecimal():
        return state.least_loaded()
    if int(named) >= len(state.drivers):
        count = len(state.drivers)
        raise SimError(400, f"data_parallel_rank {named} is out of range [0, {count}).")
    return state.drivers[int(named)]


def _admit(state: SimState, ask: Ask) -> None:
    if state.dead:
        raise engine_dead()
    limit = state.config.max_num_queued_reqs
    full = limit is not None and state.in_flight + ask.n > limit
    if full or state.faults.take("admission_503"):
        state.admission_rejections += 1
        raise busy()


def _reply_id(request: Received, ask: Ask, chosen: str) -> str:
    given = request.header("x-request-id") or ask.body.get("request_id")
    prefix = {COMPLETIONS: "cmpl-", RESPONSES: "resp_"}.get(request.path, "chatcmpl-")
    return prefix + (chosen if request.path == RESPONSES or not given else str(given))


def _writer(head: Head, path: str, *, newer: bool) -> Writer:
    writer: Writer
    if path == COMPLETIONS:
        writer = CompletionsWriter(head, _prompt_texts(head.ask))
    elif path == RESPONSES:
        writer = ResponsesWriter(head)
    elif path == MESSAGES:
        writer = MessagesWriter(head)
    else:
        writer = ChatWriter(head)
    return NewerWriter(writer) if newer else writer


def _prompt_texts(ask: Ask) -> list[str]:
    prompt = ask.body["prompt"]
    several = prompt if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]
    return [one if isinstance(one, str) else "" for one in several]


async def _together(pieces: AsyncIterator[Piece], interval: int) -> AsyncIterator[Piece]:
    """Give the first token of each choice by itself, then so many at a time, and at last what is left."""
    begun: set[int] = set()
    held: dict[int, Piece] = {}
    async for piece in pieces:
        index = piece.plan.index
        if (before := held.pop(index, None)) is not None:
            piece = replace(piece, text=before.text + piece.text, earlier=tuple(before.ids))
        if index in begun and piece.finish is None and len(piece.ids) < interval:
            held[index] = piece
        else:
            begun.add(index)
            yield piece


async def _stream(
    run: _Run, writer: Writer, request: Received, reply: Reply, interval: int
) -> None:
    reply.start_stream(EVENT_STREAM)
    open_plans, cut = {plan.index: plan for plan in run.plans.values()}, run.cut
    try:
        for frame in writer.opening():
            await reply.chunk(frame)
        if cut is not None and cut.number == 0:
            return await _break_stream(cut, writer, reply, list(open_plans.values()))
        pieces = run.pieces()
        async for piece in _together(pieces, interval) if interval > 1 else pieces:
            run.head.cache = piece.cache
            for frame in writer.piece(piece):
                await reply.chunk(frame)
            request.tokens_emitted += len(piece.ids)
            if piece.finish is not None:
                del open_plans[piece.plan.index]
            if cut is not None and cut.number is not None and cut.number <= request.tokens_emitted:
                return await _break_stream(cut, writer, reply, list(open_plans.values()))
    except SimError:  # the engine died
        return await _break_off(writer, reply)
    frames = writer.closing()
    if cut is not None and cut.name == "clean_end_without_done" and cut.arg is None:
        frames = frames[:-1]
    for frame in frames:
        await reply.chunk(frame)
    reply.end_stream()


async def _break_stream(cut: Fault, writer: Writer, reply: Reply, open_plans: list[Plan]) -> None:
    match cut.name:
        case "stall_after":
            await asyncio.Event().wait()
        case "reset_after":
            await asyncio.sleep(_READ_TIME_S)
            reply.reset()
        case "truncate_after":
            reply.cut()
        case "truncate_chunk":
            reply.raw(b'1f4\r\ndata: {"id":"chat')
            reply.cut()
        case "clean_end_without_done":
            reply.end_stream()
        case "error_frame_after":
            await _break_off(writer, reply)
        case "abort_finish":
            await _end_aborted(writer, reply, open_plans)


async def _end_aborted(writer: Writer, reply: Reply, open_plans: list[Plan]) -> None:
    frames = [f for plan in open_plans for f in writer.piece(Piece(plan, -1, "", None, "abort"))]
    for frame in [*frames, *writer.closing()]:
        await reply.chunk(frame)
    reply.end_stream()


async def _break_off(writer: Writer, reply: Reply) -> None:
    frames = writer.broken(ENGINE_DEAD)
    if frames is None:
        return reply.cut()
    for frame in frames:
        await reply.chunk(frame)
    return reply.end_stream()


async def _whole(run: _Run, writer: Writer, request: Received, reply: Reply) -> None:
    plans = list(run.plans.values())
    counts = dict.fromkeys((plan.index for plan in plans), 0)
    cut = run.cut
    reached = cut is not None and cut.number == 0
    async for piece in run.pieces():
        if reached:
            break
        run.head.cache = piece.cache
        counts[piece.plan.index] += 1
        request.tokens_emitted += 1
        reached = cut is not None and cut.number == request.tokens_emitted
    if cut is None or not reached:
        reply.send(200, compact(writer.whole(plans)), JSON)
        return
    if cut.name == "abort_finish":
        plans = [_aborted(plan, counts[plan.index]) for plan in plans]
    await _break_whole(cut, compact(writer.whole(plans)), reply)


def _aborted(plan: Plan, count: int) -> Plan:
    if count == len(plan.tokens):
        return plan
    return replace(plan, pieces=plan.pieces[:count], tokens=plan.tokens[:count], finish="abort")


async def _break_whole(cut: Fault, body: bytes, reply: Reply) -> None:
    match cut.name:
        case "stall_after":
            await asyncio.Event().wait()
        case "reset_after":
            reply.reset()
        case "truncate_after" | "truncate_chunk":
            reply.start_sized(len(body), JSON)
            reply.raw(body[: len(body) // 2])
            reply.cut()
        case "error_frame_after":
            raise SimError(500, ENGINE_DEAD, kind="InternalServerError")
        case _:
            reply.send(200, body, JSON)
