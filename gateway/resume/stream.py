"""A stream that another backend can go on with: to its client one answer, whoever writes it.

    backend --frames--> ids are taken out --> the watch, as of any stream --> client
    it fails             where it is cut: `cut` tells why, and the client is told nothing yet
    another goes on      its frames get the id and the time of the first one's, its role frame is
                         dropped, and what both counted is put together

What another backend writes is taken only if it tells that its prompt was what it was given: one that
begins anew would repeat the answer.
"""

from __future__ import annotations

from functools import partial
from typing import Final

import msgspec

from gateway.core.endings import Barrier
from gateway.core.types import Call, Demand, Dialect, Usage, UsageSource
from gateway.resume.completion import as_chat
from gateway.resume.reasoning import Expected
from gateway.resume.recital import Recital
from gateway.resume.rest import as_completion, has_messages, kept, limit_of, rest_of, takes_text
from gateway.resume.rules import held_back_chars, is_parsed, joins, may_go_on, offers_tools
from gateway.resume.seam import Reached
from gateway.resume.shown import without
from gateway.resume.sight import CHOICES, IDS
from gateway.resume.trail import Trail
from gateway.resume.transcript import Transcript
from gateway.resume.usage import add_up, added_up, counted
from gateway.wire.chunks import Shape
from gateway.wire.frames import is_whole
from gateway.wire.replies import Fault
from gateway.wire.sse import ABORTED, DONE, StreamWatch
from gateway.wire.veil import Veil

_CR: Final = ord("\r")
_HOLD_BYTES: Final = 1024 * 1024  # of half a frame; the ids of a prompt are all in one
_MOST_FAILURES: Final = 3
_MOST_UNSURE: Final = 16_384  # tokens
_ROLE: Final = b'"delta":{"role":'
_NO_CHOICES: Final = b'"choices":[]'
_ANY_CHOICES: Final = b'"choices"'  # however a server writes JSON
_fault: Final = partial(Fault, 502, "server_error", "backend_error")
_BEGAN_ANEW: Final = _fault("The stream could not be resumed on another backend.")
_TOO_LONG: Final = _fault("The backend sent a frame that is larger than 1 MiB.")


class TrailedStream(StreamWatch):
    """Judges what the client gets of all backends, as a `StreamWatch` does."""

    __slots__ = (
        "_again", "_completes", "_exact", "_expects", "_failures", "_head", "_in_step", "_partial",
        "_reached", "_summed_up", "_veil", "asked", "barrier", "cut", "offers", "resumable", "trail",
    )  # fmt: skip

    def __init__(
        self, call: Call, demand: Demand, *, request_id: str, veil: bool = False, by_text: bool = False
    ) -> None:  # fmt: skip
        """`veil` hides how much of the prompt was cached; `by_text` has another go on by the text."""
        super().__init__(
            call.dialect, choices=1, hide_usage=call.hides_usage, request_id=request_id
        )
        self.trail = self._trail_of(call, self.shape, by_text=by_text)
        self._veil = Veil() if veil else None
        self.cut: Fault | None = None  # it broke off here, and may go on
        self.asked = kept(call), demand  # all of it
        self._summed_up = False  # the frame that has only a usage has come
        self._completes = False  # who writes now writes a completion
        self._again = ""  # what was shown before, and is still to be said again
        self._expects = Expected("")  # what the first text after the seam has to be
        self._exact: bool | None = None  # what was asked for allows it; None: nobody has looked yet
        self._partial = b""
        self._in_step = False  # one more token changes nothing else
        self._head = b""  # what the first backend's frames begin with, up to their choices
        self._reached: Reached | None = None  # where the last one went on, if not the first writes
        self.barrier: Barrier | None = None  # why nobody can go on where it broke off
        self.resumable = True  # nobody wants it to end where it breaks off
        self._failures = 0  # of backends, behind which others went on
        self.offers: dict[str, msgspec.Raw] = {}  # of a rest that becomes a chat: its tools

    def _trail_of(self, call: Call, shape: Shape, *, by_text: bool) -> Trail | Transcript | Recital:
        if by_text:
            return Transcript(call.dialect, shape)
        return Trail(call.dialect, shape, held_back_chars(call), parsed=is_parsed(call))

    def feed(self, data: bytes) -> bytes:
        """Take bytes as they came; return what may be sent on now."""
        self._in_step = False
        if self.cut is not None:
            return b""
        if self._partial:
            data = self._partial + data
        if _CR in data:  # some servers end lines so; JSON holds none as it is
            data = data.replace(b"\r\n", b"\n")
        end = data.rfind(b"\n\n") + 2
        self._partial = data[end:] if end > 1 else data
        if end == 1:
            return self._too_long() if len(data) > _HOLD_BYTES else b""
        if self._finished and self._reached is None and data.find(IDS) < 0:
            ours = data[:end]  # behind its end nobody goes on: nothing of this is kept
        elif data.find(b"\n\n") + 2 == end:
            ours = self._ours(data[:end])
        else:
            frames = data[: end - 2].split(b"\n\n")
            ours = b"".join([self._ours(each + b"\n\n") for each in frames])
        if self.trail.strayed:
            self.resumable = False
            return self._end(_BEGAN_ANEW)
        if self._unheard and _ANY_CHOICES in data:
            return self._end(_BEGAN_ANEW)  # it does not tell what it was given: another one may
        out = StreamWatch.feed(self, ours) if ours else b""  # `super` takes long before Python 3.12
        held = self._partial or self._carry or self._held or self._again or self._expects.kind
        self._in_step = not (held or self.ended or self.cut is not None)
        return out if self._veil is None else self._veil.feed(out)

    def _too_long(self) -> bytes:
        """Drop the ids of a prompt that has too many to be kept; end the stream where half a frame has none."""
        trail = self.trail
        short = trail.give_up(self._partial) if isinstance(trail, Trail) else None
        if short is None:
            return self._end(_TOO_LONG)
        self._partial = short
        return b""

    def by_sight(self, data: bytes) -> bytes | None:
        """Count the tokens of a read that holds nothing else; return what the client gets of it. None: feed it."""
        if not self._in_step:
            return None
        if (shown := self.trail.tell(data)) is not None:
            self.events += 1
            return shown
        several = self.trail.tell_several(data)
        self.events += len(several)
        return b"".join(several) or None

    def close(self) -> bytes:
        """Take note that the backend ended its stream in order; return the rest and the ending."""
        rest, self._partial = self._partial.rstrip(b"\r\n") + b"\n\n", b""  # it may lack that line
        out = super().feed(self._ours(rest)) if self.cut is None and is_whole(rest) else b""
        return self._unveiled(out + super().close() if self.cut is None else out)

    def broken(self, fault: Fault) -> bytes:
        """Take note that the stream broke off; return the ending, empty where it may go on."""
        if self.cut is not None:
            return b""
        ending = super().broken(fault)
        if ending and self.complete and not self._summed_up:
            ending = ending.removesuffix(DONE) + self._counted() + DONE
        return self._unveiled(ending)

    def _counted(self) -> bytes:
        """Return the last frame of a stream that had said everything: its usage, which its ids tell if nothing did."""
        counts = self.trail.counts
        if counts is None:
            return b""
        self.usage = used = self.usage or Usage(*counts, UsageSource.COUNTED)
        wanted = self.asked[0].wants_usage
        return counted(self._head, used.prompt_tokens, used.completion_tokens) if wanted else b""

    def _unveiled(self, last: bytes) -> bytes:
        """Return the last bytes of a backend, with what was held back to hide counts in it."""
        return last if self._veil is None else self._veil.feed(last) + self._veil.end()

    def ends_here(self) -> None:
        """Have it end where it breaks off: no other backend goes on."""
        self.resumable = False

    @property
    def unsure(self) -> list[int]:
        """The tokens that may have shown `trail.again`: nobody can go on until their text tells which did."""
        return self._unsure() if self.cut is not None else []

    def shown_of(self, text: str) -> str | None:
        """Return what was shown of the text of the unsure tokens; None: nobody can tell."""
        return self.trail.shown_of(text) if isinstance(self.trail, Trail) else None

    def put_seam(self, tokens: int, again: str) -> None:
        """Go on behind so many of the unsure tokens; `again` was shown beyond them."""
        if isinstance(self.trail, Trail):
            self.trail.put_seam(tokens, again)
        self.barrier = self._barrier()

    @property
    def went_on(self) -> bool:
        """Whether another backend than the first one writes it, or is to."""
        return self._reached is not None

    @property
    def awaits(self) -> bool:
        """Whether it broke off, and nothing came of the rest yet."""
        return self.cut is not None or self._unheard

    @property
    def _unheard(self) -> bool:
        """Whether nothing came of the rest that was asked for last."""
        return self._reached is not None and not self.trail.proven

    @property
    def answering(self) -> bool:
        """See `StreamWatch`: whether who writes now has begun."""
        return self.trail.proven if self.went_on else super().answering

    # --- where one backend ends, and another goes on ------------------------------------------------

    @property
    def may_leave(self) -> bool:
        """Whether it can be cut now, where its backend still writes, so that another one goes on."""
        if self.ended or self.awaits or not self._goes_on():
            return False
        limit = limit_of(*self.asked)
        return limit is None or self.trail.said_tokens < limit

    def rest(self, *, moved: bool = False) -> tuple[Call, Demand] | None:
        """Return the request for what is left of one that broke off, and have what comes be its answer.

        `moved` tells that no backend failed.
        """
        if not (self.awaits and self.resumable) or self.barrier is Barrier.SEAM:
            return None
        reached = self._reached if self._unheard else self.trail.reached()
        rest = None if reached is None else rest_of(*self.asked, reached, self.offers)
        if reached is None or rest is None:
            return None
        self.trail.go_back(reached, self._head)
        self._reached, self._again = reached, reached.again
        self._expects = Expected(self.trail.kind if self.trail.reasoned else "")
        self.events = reached.said_tokens  # what was seen beyond them is made again
        self._failures += not moved
        self.resumable = self._failures < _MOST_FAILURES
        self._partial = self._carry = b""
        self.cut = self.fault = self.usage = None  # what the last one counted is a part of it
        self.failed = self._in_step = self.ended = self._aborted = self._summed_up = False
        return rest

    @property
    def needs_ids_in_chats(self) -> bool:
        """Whether its rest is a chat that stands in token ids: only a vLLM since 0.27 takes that."""
        call = self.asked[0]
        if isinstance(self.trail, Transcript) or call.dialect is Dialect.COMPLETIONS:
            return False
        return self.trail.said_tokens > 0 or not has_messages(call)

    @property
    def may_complete(self) -> bool:
        """Whether a completion in place of that chat would say the same: no parser has a part in it."""
        return self.trail.is_plain and not offers_tools(self.asked[0])

    def sent(self, call: Call, *, takes_ids: bool, room_tokens: int) -> Call:
        """Return `call`, which is for this stream, as it is sent to a backend: its rest maybe as a completion."""
        self._completes = (
            not takes_ids and self.went_on and self.needs_ids_in_chats and self.may_complete
        )
        return as_completion(call, room_tokens) if self._completes else call

    def _end(self, fault: Fault, *, done: bool = False) -> bytes:
        out = super()._end(fault, done=done)
        return b"" if self.cut is not None else out  # else with [DONE]

    def _tell(self, fault: Fault) -> bytes:
        """Cut the stream here if it may go on; else write an error frame."""
        if fault.status >= 500 and (self._goes_on() or self._unsure()):
            self.cut = self.fault = fault
            return b""
        return super()._tell(fault)

    def _goes_on(self) -> bool:
        self.barrier = self._barrier()
        return self.barrier is None

    def _barrier(self) -> Barrier | None:
        """Return why nobody can go on from here; None where another backend can."""
        if self.trail.strayed:
            return Barrier.STRAYED
        if not self.resumable:
            return Barrier.FAILURES
        call, trail = self.asked[0], self.trail
        if self._exact is None:
            by_text = isinstance(trail, Transcript)
            self._exact = may_go_on(call) and (not by_text or takes_text(call))
        if not self._exact:
            return Barrier.REQUEST
        if self._finished or self._long is not None or not trail.leads_on:
            return Barrier.REPLY  # behind its end nothing follows, nor behind a part of a frame
        if self._unheard:  # its seam was found before
            return None
        if self._again or (trail.reasoned and trail.again):
            return Barrier.SEAM
        return None if joins(call, trail.tail, trail.again) else Barrier.SEAM

    def _unsure(self) -> list[int]:
        """Return the tokens of which it is not known how many were shown, where that keeps others from going on.

        Greedy choices could be made again, but all of those behind a parser would be.
        """
        trail = self.trail
        if self._again or not isinstance(trail, Trail):
            return []
        if self.barrier is not Barrier.SEAM and (self.barrier is not None or not trail.parsed):
            return []
        unsure = trail.unsure if joins(self.asked[0], trail.tail + trail.again, "") else []
        return unsure if len(unsure) <= _MOST_UNSURE else []

    def _judge_chunk(self, frame: bytes, payload: bytes) -> bytes:
        out = super()._judge_chunk(frame, payload)
        self._summed_up = self._summed_up or frame.find(_NO_CHOICES) >= 0
        if self._aborted and not self.ended:
            return self._end(ABORTED)  # the client must not see the end of what may go on
        return out

    def _ours(self, frame: bytes) -> bytes:
        """Return a frame as the client is to get it."""
        trail, reached = self.trail, self._reached
        if self._completes:
            frame = as_chat(frame)
        if not isinstance(trail, Trail):
            assert isinstance(trail, Transcript)
            trail.keep(frame)
            if reached is None:
                return frame
            return trail.retold(frame, lambda usage: add_up(usage, reached.said_tokens))
        frame = trail.strip(frame)
        if reached is not None:
            frame = self._gone_on(frame, reached)
        elif not self._head:
            self._head = frame[: max(0, frame.find(CHOICES))]
            self._learns = trail.counts is None  # else the trail tells tokens by sight
        self.events += trail.silent
        return b"" if trail.silent else frame

    def _gone_on(self, frame: bytes, reached: Reached) -> bytes:
        """Return a frame of another backend as one of the first."""
        at = frame.find(CHOICES)
        if at < 0:
            return frame
        if not self.trail.proven or _ROLE in frame:
            return b""
        frame = self._head + frame[at:]
        if self._expects.kind and not self._expects.fits(frame):
            self.trail.strayed = True
            return b""
        if self._again:
            told = without(frame, self.trail.shows(frame), self._again)
            if told is None:
                self.trail.strayed = True
                return b""
            frame, self._again = told
        return added_up(frame, len(reached.reply), reasoned=self.trail.reasoned)
