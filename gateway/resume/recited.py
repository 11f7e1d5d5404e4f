"""A stream of Messages or Responses that another backend can go on with: a `TrailedStream` that tells no ids.

    it fails             where it is cut, backends are asked for its ids: `wants_ids`, `ids_are`
    it is to leave       they are asked while its backend still writes: `could_leave`, `ids_are`, `may_leave`
    another goes on      as a chat with the same tools (`offer`), whose frames become events of the stream

An engine that aborts a request ends its text in order, and tells the abort last. So the end of a text is held
back until the next event, which comes with it.

An event above 1 MiB is passed on in parts. Nobody can go on from then on, and the stream is watched as any
other (`_passes`).
"""

from __future__ import annotations

from typing import Final

import msgspec

from gateway.core.endings import Barrier
from gateway.core.types import Call, Demand, Usage, UsageSource
from gateway.resume.completion import as_chat
from gateway.resume.reasoning import OPENING_TOKENS
from gateway.resume.recital import ABORTED, Recital
from gateway.resume.rest import limit_of
from gateway.resume.retelling import SHOWS_TEXT, SIGNS, Spent, tells_abort, tells_error
from gateway.resume.rules import held_back_chars, thinking_budget
from gateway.resume.stream import TrailedStream
from gateway.wire.chunks import Shape
from gateway.wire.sse import StreamWatch

_ENDS_TEXT: Final = (
    b"event: content_block_stop\n",
    b"event: response.output_text.done\n",
    b"event: response.reasoning_text.done\n",
    b"event: response.content_part.done\n",
    b"event: response.output_item.done\n",
)
# With these begin the calls of tools that vLLM's parsers look for, but for two of them (0.32).
_BEGINS_CALLS: Final = ("<", "[")
_ENDS_THOUGHT: Final = ("\n\n", "\n", " ")


class RecitedStream(TrailedStream):
    """Judges as a `TrailedStream` does. It leaves a drained backend once its ids are known.

    The call that it is made with has all of its body. Without any nobody can go on.
    """

    __slots__ = ("_failed_here", "_held_end", "_passes", "prompt")
    trail: Recital
    prompt: list[int] | None  # its ids, once somebody told them

    def _trail_of(self, call: Call, shape: Shape, *, by_text: bool) -> Recital:
        self._held_end = b""  # events that end a text
        self._failed_here = False  # the first backend told why; nothing of it that follows counts
        self._passes = False  # a part of an event was passed on
        self.prompt = None
        return Recital(call.dialect, shape, held_back_chars(call))

    def feed(self, data: bytes) -> bytes:
        """Take bytes as they came; return what may be sent on now."""
        if self._is_piece(data):
            self._in_step = True
            self.trail.keep(data)
            return StreamWatch.feed(self, data)
        if self._passes:
            return self._pass_on(data)
        out = super().feed(data)
        self._in_step = self._in_step and not self._held_end
        return out

    def _is_piece(self, data: bytes) -> bool:
        """Whether data is what most reads are: one whole frame of the first backend that may show more text."""
        if not data.startswith(SHOWS_TEXT) or data.find(b"\n\n") != len(data) - 2:
            return False
        if self._reached is not None or self._veil is not None or self.cut is not None:
            return False
        if SIGNS in data:
            return False
        return not (
            self._partial or self._carry or self._held_end or self._failed_here or self.ended
        )

    def _too_long(self) -> bytes:
        if self._reached is not None or self._failed_here:
            return super()._too_long()
        self._passes, self.trail.lost = True, True
        held, self._held_end, self._partial = self._held_end + self._partial, b"", b""
        return self._pass_on(held)

    def _pass_on(self, data: bytes) -> bytes:
        out = StreamWatch.feed(self, data)
        return out if self._veil is None else self._veil.feed(out)

    @property
    def call(self) -> Call:
        """What was asked for."""
        return self.asked[0]

    @property
    def wants_ids(self) -> bool:
        """Whether it broke off where another backend could go on, if somebody tells its token ids."""
        return self.cut is not None and self.trail.reached() is None and self.barrier is None

    @property
    def marks(self) -> tuple[str, ...]:
        """What a parser may have held back right behind the text that was shown.

        The model may have written it in one token with the end of the text: nobody goes on then.
        """
        if not self.trail.pieces:
            return ()
        chosen = self.offers.get("tool_choice")
        parsed = chosen is not None and bytes(chosen) != b'"none"'
        return (_BEGINS_CALLS if parsed else ()) + (_ENDS_THOUGHT if self.trail.thinks else ())

    def rest(self, *, moved: bool = False) -> tuple[Call, Demand] | None:
        """See `TrailedStream`; the end that the last backend gave its text is none."""
        rest = super().rest(moved=moved)
        if rest is not None:
            self._held_end = b""
        return rest

    def offer(self, tools: dict[str, msgspec.Raw] | None) -> bool:
        """Have the backend that goes on offer these tools, as a chat has them; None: a chat's form is not known.

        Return whether it is known.
        """
        if tools is None:
            self.barrier = Barrier.REQUEST
            return False
        self.offers, self.trail.may_call = self.offers | tools, "tools" in tools
        return True

    def render_with(self, fields: dict[str, msgspec.Raw]) -> None:
        """Have the next backend's parser get the fields that told the prompt's template how much to reason."""
        self.offers = self.offers | fields

    def ids_are(
        self,
        prompt: list[int],
        reply: list[int],
        tokens: list[str],
        pieces: list[str] | None = None,
    ) -> bool:
        """Go on behind these ids, if they are proven, which is returned; `tokens` are the reply's as text.

        `pieces` are what was shown as the ids were asked for: the backend may have shown more since.
        """
        trail = self.trail
        hidden = trail.thinks and (trail.closes is None or self._may_be_forced(len(reply)))
        proven = not hidden and trail.ids_are(
            prompt, reply, tokens, trail.pieces if pieces is None else pieces
        )
        if proven:
            self.prompt = prompt
        else:
            self.barrier = Barrier.IDS
        return proven

    def _may_be_forced(self, said_tokens: int) -> bool:
        """Whether an engine may have begun to write the end of the thinking, which has a budget.

        It counts what stands behind the mark in the prompt, too.
        """
        budget = thinking_budget(self.call)
        return budget is not None and said_tokens > budget - OPENING_TOKENS

    @property
    def could_leave(self) -> bool:
        """Whether it could be cut now, if somebody told its token ids."""
        return super().may_leave and not self._held_end

    @property
    def may_leave(self) -> bool:
        """See `TrailedStream`: only where the token ids of all that was shown are known."""
        if not self.could_leave or (reached := self.trail.reached()) is None:
            return False
        limit = limit_of(*self.asked)
        return limit is None or reached.said_tokens < limit

    @property
    def lacks_its_end(self) -> bool:
        """Whether it broke off behind the last token that it may have, as its ids prove: only its end was not told."""
        limit, reached = limit_of(*self.asked), self.trail.reached()
        if self.cut is None or self.barrier is not None or limit is None or reached is None:
            return False
        return reached.said_tokens >= limit and not reached.again

    def told_end(self) -> bytes:
        """Return the end of a stream that lacks nothing else: it has as many tokens as it may have."""
        limit, reached = limit_of(*self.asked), self.trail.reached()
        assert limit is not None
        assert reached is not None
        self.cut = self.fault = None
        self.failed = self.ended = self._aborted = False
        spent = Spent(len(reached.prompt), limit, limit if self.trail.thinks else 0)
        end = self.trail.teller.end("length", None, "".join(self.trail.pieces), spent)
        out = self._unveiled(StreamWatch.feed(self, end))
        cached = None if self.began is None else self.began.cached_tokens
        self.usage = Usage(len(reached.prompt), limit, UsageSource.COUNTED, cached)
        return out

    def _barrier(self) -> Barrier | None:
        return super()._barrier() if self.call.body else Barrier.BODY

    def _ours(self, frame: bytes) -> bytes:
        if self._reached is not None:
            frame = as_chat(frame) if self._completes else frame
            events, self._again = self.trail.retold(frame), self.trail.left
            return events
        if self._failed_here:
            return b""
        if not frame.startswith(SHOWS_TEXT) or SIGNS in frame:
            if frame.startswith(_ENDS_TEXT) or SIGNS in frame:
                self._held_end += frame
                return b""
            if tells_abort(frame):
                self._failed_here = True
                return ABORTED
            if tells_error(frame):
                self._failed_here = True
                return frame
        if self._held_end:
            frame, self._held_end = self._held_end + frame, b""
        self.trail.keep(frame)
        return frame
