"""What a request needs, judged and counted: the last step before it asks its pool for a backend."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import msgspec
from msgspec import structs

from gateway.admission.gate import Gate
from gateway.core.aio import beside
from gateway.core.errors import ContextLengthExceeded, Overloaded
from gateway.core.exclusion import Chance
from gateway.core.types import (
    SERVING,
    Ask,
    Call,
    Demand,
    Endpoint,
    Phase,
    RequestRecord,
    ShedReason,
)
from gateway.counting.context import bound, is_engines_own, settle, unjudged, unsettled, window_of
from gateway.counting.counters import NobodyTold
from gateway.counting.ids import Tokens
from gateway.counting.offers import offers_of
from gateway.ingress.downstream import Downstream
from gateway.ingress.leaving import runs_another
from gateway.ingress.settings import Settings
from gateway.pools.table import Backend, PoolTable
from gateway.prefix.hashing import FIRST_BYTES, READ, PrefixHasher, written_salt
from gateway.prefix.precise import PromptBlocks
from gateway.prefix.ranked import block_shapes
from gateway.resume.reasoning import OPENING_TOKENS, closing_mark
from gateway.resume.recited import RecitedStream
from gateway.resume.stream import TrailedStream
from gateway.routing.choice import was_tried

UNMEASURED: Final = Demand(0, exact=False)  # of an ask of which nothing is known yet

# The parts of a character are 4 tokens at most, a mark of tool calls some more.
_MOST_ASKED: Final = 16
_NOT_WHOLE: Final = "\ufffd"  # how a character ends whose other tokens are missing
# To read the ids of a prompt: a tenth of what a fast engine needs to compute as much.
_READ_S: Final = 0.02
_READ_BYTE_S: Final = 1e-6
_MOST_READ_S: Final = 0.5
# A text with more bytes for each token of the window is too long: a count that was late would be late again.
# Russian with escapes has 18, as much as any.
_LONGEST_TOKEN_BYTES: Final = 24
_AGAIN_S: Final = (1.0, 3.0)  # spread: many are refused at one moment


@dataclass(frozen=True, slots=True)
class Measuring:
    """Notes in an ask, and in its record, what it needs: `at_once`, else `counted`."""

    table: PoolTable
    gate: Gate
    hasher: PrefixHasher = field(default_factory=PrefixHasher)
    read_s: float = _READ_S  # what token ids are waited for, at least

    def at_once(self, settings: Settings, record: RequestRecord, ask: Ask) -> bool:
        """Whether its size tells what it needs; else its prompt must be counted.

        Raises:
            RequestError: its pool takes no such call, or it does not fit (400).
        """
        call, route, caller = ask.call, ask.route, ask.caller
        settings.policies.judge(call, route.pool, caller.parameters)
        policy = settings.on_overflow[route.pool]
        demand = bound(call, route=route, caller=caller, policy=policy)
        if demand is None or route.pool in settings.precise:
            return False
        self._note(record, ask, demand)
        return True

    async def counted(self, settings: Settings, record: RequestRecord, ask: Ask) -> None:
        """Count the prompt exactly where its size alone does not tell whether it fits.

        Where engines tell what they hold, its token ids are read too, if that takes no longer than it
        is worth.

        Raises:
            RequestError: it does not fit (400).
            Overloaded: it may not, and nobody counted it in time (503).
        Cancel: nothing is held.
        """
        call, route, caller = ask.call, ask.route, ask.caller
        demand = None
        if route.pool in settings.precise:
            policy = settings.on_overflow[route.pool]
            blocks = await self._blocks(settings, ask)
            if blocks is not None:
                demand = settle(call, len(blocks), route=route, caller=caller, policy=policy)
                return self._note(record, ask, demand, blocks)
            demand = bound(call, route=route, caller=caller, policy=policy)
        # In other pools `at_once` has found that the prompt's size does not tell.
        self._note(record, ask, demand or await self._counted(settings, ask))

    async def judge(self, settings: Settings, record: RequestRecord, ask: Ask) -> None:
        """Judge whether a request fits that was let in, but which nobody could count as it came.

        Raises:
            RequestError: it does not fit (400).
            Overloaded: it may not, and nobody counted it in time (503).
        Cancel: nothing is held.
        """
        record.demand = ask.demand = await self._counted(settings, ask)

    async def _blocks(self, settings: Settings, ask: Ask) -> PromptBlocks | None:
        """Return the blocks of a prompt; None if no engine tells what it holds, or the ids were not read in time."""
        call, route = ask.call, ask.route
        shapes = block_shapes(self.table.backends(route.pool))
        if not shapes or len(call.body) < FIRST_BYTES or call.endpoint not in READ:
            return None
        written = written_salt(call)
        salt = msgspec.json.decode(written, type=str | None) if written else None
        make_salt = settings.salt(ask) if route.tenants_apart else None
        if make_salt is not None:
            salt = make_salt(salt)

        def cut(tokens: Sequence[int]) -> PromptBlocks:
            return PromptBlocks(tokens, route.adapter, salt, shapes)

        within_s = min(self.read_s + len(call.body) * _READ_BYTE_S, max(self.read_s, _MOST_READ_S))
        return await settings.counters.read(call, route, cut, within_s=within_s)

    async def _counted(self, settings: Settings, ask: Ask) -> Demand:
        call, route, caller = ask.call, ask.route, ask.caller
        policy = settings.on_overflow[route.pool]
        backends = self.table.backends(route.pool)
        serving = [each for each in backends if each.phase is Phase.READY]
        serving = serving or [each for each in backends if each.phase is Phase.DEGRADED]
        in_time = True
        try:
            demand = await self._settled(settings, ask, serving)
        except NobodyTold:
            demand, in_time = None, False
        if demand is not None:
            return demand
        if not serving:  # the gate refuses it, or lets it wait for a backend that starts
            return unjudged(call, caller=caller, policy=policy)
        judge = partial(unsettled, call, route=route, caller=caller, policy=policy)
        try:
            return judge() if call.places is None else await beside(judge)
        except ContextLengthExceeded:
            window_tokens = window_of(route, caller) or 0
            if in_time or (call.text_bytes or 0) > _LONGEST_TOKEN_BYTES * window_tokens:
                raise
            raise _uncounted(window_tokens) from None

    async def _settled(
        self, settings: Settings, ask: Ask, serving: Sequence[Backend]
    ) -> Demand | None:
        """Return the demand of a prompt that was counted; None where the count does not decide.

        Raises:
            RequestError: it does not fit (400).
            NobodyTold: nobody counted it in time.
        """
        call, route, caller = ask.call, ask.route, ask.caller
        policy = settings.on_overflow[route.pool]
        tokens = await settings.counters.count(call, route, serving)
        if tokens is None:
            return None
        fit = partial(settle, call, route=route, caller=caller, policy=policy)
        try:
            return fit(tokens)
        except ContextLengthExceeded:
            if not is_engines_own(route, caller):
                raise
            bare = await settings.counters.count_without_tools(call, route, serving)
            if bare is None:
                raise
            fit(bare)  # it may be too long without them, too
            return None

    async def find_way(self, settings: Settings, ask: Ask, stream: TrailedStream) -> Backend | None:
        """Ask backends for what is not known of a stream that broke off, and is needed to go on with it.

        Return the backend that failed as it read the prompt for that, if one did: another one may be asked.
        Cancel: nothing is held.
        """
        if not isinstance(stream, RecitedStream):
            await self.find_seam(settings, ask, stream)
        elif stream.wants_ids:
            _, failed = await self.find_ids(settings, ask, stream)
            return failed
        return None

    async def find_seam(self, settings: Settings, ask: Ask, stream: TrailedStream) -> None:
        """Ask a backend how many of the last tokens of a stream that broke off were shown, if that is not known.

        The last one or more may be parts of a character that is not whole, or of what may become a tool
        call. Nobody goes on within a character: vLLM would write all of the prompt. Cancel: nothing is held.
        """
        unsure, shown = stream.unsure, None
        serving = self._serving(ask)
        for tokens in range(len(unsure), max(0, len(unsure) - _MOST_ASKED), -1):
            text = await settings.counters.text_of(unsure[:tokens], ask.route, serving)
            if text is not None and shown is None:
                shown = stream.shown_of(text)
            if text is None or shown is None:
                return
            if shown.startswith(text) and not text.endswith(_NOT_WHOLE):
                stream.put_seam(tokens, shown[len(text) :])
                return

    async def find_ids(
        self, settings: Settings, ask: Ask, stream: RecitedStream
    ) -> tuple[bool, Backend | None]:
        """Ask for the token ids of the prompt, and of what was shown.

        Return whether they are proven, and the backend that failed as it read the prompt for that, if one did.
        Cancel: nothing is held.
        """
        able = self._able(ask)
        if not able or not stream.offer(await offers_of(stream.call)):
            return False, None
        pieces, prompt = stream.trail.pieces, stream.prompt
        shown = await self._tokens_shown(settings, ask, stream, able)
        if shown is not None and prompt is None and stream.call.endpoint is Endpoint.MESSAGES:
            found = await settings.counters.prompt_ids(
                stream.call, stream.trail.teller.prompt_tokens, ask.route, able
            )
            if found is not None:
                prompt = found.ids
                stream.render_with(found.effort)
        elif shown is not None and prompt is None:
            reader = min(able, key=lambda each: each.in_flight)
            salt = settings.salt(ask) if ask.route.tenants_apart else None
            try:
                prompt = await settings.counters.read_ids(stream.call, ask.route, reader, salt)
            except OSError:
                return False, reader
        if stream.trail.thinks and prompt:
            stream.trail.closes = await self._mark(settings, ask, prompt, able)
        return stream.ids_are(prompt or [], *(shown or ([], [])), pieces), None

    async def _mark(
        self, settings: Settings, ask: Ask, prompt: list[int], able: Sequence[Backend]
    ) -> int | None:
        """Ask for the token that ends the reasoning that a prompt begins; None: it begins none, as far as is known."""
        end = await settings.counters.text_of(prompt[-OPENING_TOKENS:], ask.route, able)
        mark = closing_mark(end or "")
        tokens = None if mark is None else await settings.counters.tokens_of(mark, ask.route, able)
        return tokens.ids[0] if tokens is not None and len(tokens.ids) == 1 else None

    async def find_rest_of_ids(self, settings: Settings, ask: Ask, stream: RecitedStream) -> None:
        """Ask for the token ids of what was shown by now; those of its prompt are known. Cancel: nothing is held."""
        pieces = stream.trail.pieces
        shown = await self._tokens_shown(settings, ask, stream, self._able(ask))
        stream.ids_are(stream.prompt or [], *(shown or ([], [])), pieces)

    async def _tokens_shown(
        self, settings: Settings, ask: Ask, stream: RecitedStream, able: Sequence[Backend]
    ) -> Tokens | None:
        """Ask for the tokens of what was shown; None where nobody tells, or the last may have had more text."""
        counters, text = settings.counters, "".join(stream.trail.pieces)
        shown = await counters.tokens_of(text, ask.route, able)
        if shown is None:
            return None
        for mark in stream.marks:
            longer = await counters.tokens_of(text + mark, ask.route, able)
            if longer is None or longer.ids[: len(shown.ids)] != shown.ids:
                return None
        return shown

    def _able(self, ask: Ask) -> list[Backend]:
        return [each for each in self._serving(ask) if not each.plain]

    def _serving(self, ask: Ask) -> list[Backend]:
        """Return the backends that serve and run the same model; where the request failed, only if they came back."""
        members = self.table.backends(ask.route.pool)
        alike = [each for each in members if not runs_another(each, ask)]
        return [each for each in alike if each.phase in SERVING and not was_tried(each, ask)]

    def rest(
        self, record: RequestRecord, ask: Ask, stream: TrailedStream, chance: Chance, *, moved: bool
    ) -> bool:
        """Have an ask be for what is left of its stream; False when that cannot be had.

        `moved` tells that no backend failed.
        """
        rest = stream.rest(moved=moved) if chance is not Chance.NEVER else None
        if rest is None:
            return False
        ask.moves_rest = moved
        if record.usage is not None:  # its client may leave before the next one tells anything
            record.usage = structs.replace(record.usage, completion_tokens=stream.events)
        self._asks(ask, *rest)
        return True

    def anew(self, down: Downstream, ask: Ask, stream: TrailedStream) -> None:
        """Have an ask be for all of its stream again, of which its client has nothing yet."""
        (call, demand), asked = stream.asked, down.asked
        if asked is not None and asked.places is not None:  # the stream keeps no large body
            call = structs.replace(asked, tells_ids=call.tells_ids)
        self._asks(ask, call, demand)
        down.trailed = None

    def _asks(self, ask: Ask, call: Call, demand: Demand) -> None:
        ask.call, ask.demand, ask.prefix = call, demand, None
        ask.need = self.gate.needs.of(call, demand, ask.caller, ask.route.widest_tokens)

    def _note(
        self, record: RequestRecord, ask: Ask, demand: Demand, blocks: PromptBlocks | None = None
    ) -> None:
        record.demand = ask.demand = demand
        window = ask.route.widest_tokens
        record.need = ask.need = self.gate.needs.of(ask.call, demand, ask.caller, window)
        ask.asked_at = record.body_at or record.received_at
        ask.prefix = self.hasher.of(ask, self.table.backends(ask.route.pool))
        if ask.prefix is not None:
            ask.prefix.blocks = blocks
            ask.prefix.takes_rank = ask.call.endpoint is not Endpoint.RESPONSES
        ask.top_priority = self.gate.top_priority
        ask.returned = record.client_retry > 0
        if record.fallback is not None:
            ask.fallback = record.fallback


def rest_sent(record: RequestRecord, ask: Ask) -> None:
    """Count that another backend is sent the rest of a stream. What nobody had room for in time does not count."""
    record.resumed += 1
    record.moved += ask.moves_rest is True
    ask.moves_rest = None


def _uncounted(window_tokens: int) -> Overloaded:
    """Return the refusal, for now, of a prompt that may be too long."""
    return Overloaded(
        f"The prompt may be longer than the {window_tokens} tokens that it may have, and no backend counted it"
        " in time. Retry.",
        reason=ShedReason.ENGINE,
        retry_after_s=random.uniform(*_AGAIN_S),
    )
