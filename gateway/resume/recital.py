"""What is kept of a stream of Messages or Responses, so that another backend can go on with it. Pure.

vLLM takes token ids on these endpoints, but tells none (0.32). So what is kept is the text, piece by
piece, and the id of the reply. Once its backend fails, others are asked for the ids of the prompt
and of the text (`ids_are`). The rest comes as a chat, and is told in the events of the stream. It may
call tools; behind a call nobody goes on. A thought goes on as a thought; nobody goes on behind one.

Frames are read only once a backend fails, or 32 KiB of them have come; a piece takes three bytes more
than its text from then on.
"""

from __future__ import annotations

from typing import Final

import msgspec

from gateway.core.types import Dialect
from gateway.resume.chatchunk import CHUNK, Choice, Delta, Details, Function, ToolCall
from gateway.resume.messageteller import MessageTeller
from gateway.resume.pieces import ends_of, fits, up_to
from gateway.resume.responseteller import ResponseTeller
from gateway.resume.retelling import EVENT, Spent, Strange
from gateway.resume.seam import Reached
from gateway.resume.shown import shown_by_chat
from gateway.wire.chunks import Shape, inside
from gateway.wire.objects import decode_or_none

_MOST_UNREAD_BYTES: Final = 32 * 1024
_MOST_BYTES: Final = 1024 * 1024
_PIECES: Final = msgspec.json.Decoder(list[str])
ABORTED: Final = (  # the error frame that stands for an engine's abort
    b'data: {"error":{"message":"The backend aborted the request.","type":"server_error"'
    b',"code":"backend_error"}}\n\n'
)
_NO_CHUNKS: Final = (b"", b"[DONE]")
_GOOD: Final = frozenset({"stop", "length", "tool_calls"})


class Recital:
    """The reply of one stream, as far as it has come. Its owner hands it every read, as to a `Trail`."""

    kind: Final = ""
    reasoned: Final = False
    counts: Final = None  # who goes on tells ids, and the first backend none
    shows = staticmethod(shown_by_chat)  # the rest always comes as chat chunks

    __slots__ = (
        "_arguments_bytes", "_awaits_mark", "_behind_thought", "_call", "_finish", "_given", "_held_back",
        "_open", "_pieces", "_reached", "_reached_at", "_shape", "_told_tokens", "_unread",
        "closes", "left", "lost", "may_call", "proven", "strayed", "teller",
    )  # fmt: skip

    def __init__(self, dialect: Dialect, shape: Shape, held_back_chars: int = 0) -> None:
        """`shape` is what the watch learns of the stream's frames.

        `held_back_chars` is how much the engine keeps back, to look for stop strings in it.
        """
        self._shape = shape
        self._held_back = held_back_chars
        self.left = ""  # what was shown before, and is still to be said again
        self.teller = MessageTeller() if dialect is Dialect.MESSAGES else ResponseTeller()
        self.may_call = False  # the backend that goes on may call tools
        self.proven = True  # who writes now has told that its prompt is the right one
        # The backend that goes on reported another prompt, or sent something that is no plain text or too much.
        self.strayed = False
        self.lost = False  # too much was said, or what cannot be gone on with
        self._pieces = bytearray()  # JSON strings, with a comma after each
        self._unread = bytearray()  # whole frames
        self._open = ""  # text before the next backend's first piece, where engines hold text back
        self._reached: Reached | None = None  # from where another backend can go on
        self._reached_at = 0  # where `_pieces` ended then
        # The ids that the current backend was started from; None while the first backend writes.
        self._given: Reached | None = None
        self._told_tokens = 0  # of the reply, written by the backend that went on
        self._behind_thought = False  # the backend that went on has ended a thought
        self._finish: Choice | None = None  # the last choice, until its end is told
        self.closes: int | None = None  # the token that ends a thought, where its prompt began one
        self._awaits_mark = False  # the next backend has sent neither that nor more of the thought
        self._call: int | None = None  # the index of the tool call that began last
        self._arguments_bytes = 0  # of all calls

    def tell(self, chunk: bytes) -> bytes | None:
        """Keep a chunk that is one more piece, and return it; None for others."""
        if self._given is not None or not self._shape.fits(chunk):
            return None
        self.keep(inside(chunk))
        return chunk

    def tell_several(self, data: bytes) -> list[bytes]:
        """Keep what several chunks in one read tell, and return them; nothing: `data` must be parsed."""
        chunks = [] if self._given is not None else self._shape.split(data)
        for each in chunks:
            self.keep(inside(each))
        return chunks

    def keep(self, frame: bytes) -> None:
        """Keep a whole frame of the first backend."""
        self._unread += frame
        if len(self._unread) > _MOST_UNREAD_BYTES:
            self._read()

    def _read(self) -> None:
        unread, self._unread = bytes(self._unread), bytearray()
        if unread and not self.lost:
            texts = self.teller.texts(unread)
            if texts is None:
                self._read_slowly(unread)
            else:
                self._add(*texts)

    def _read_slowly(self, frames: bytes) -> None:
        for frame in frames.split(b"\n\n"):
            payload = frame.partition(b"data: ")[2]
            if not payload:
                continue  # a comment
            event = decode_or_none(EVENT, payload)
            try:
                if event is None:
                    raise Strange
                self._add(self.teller.take(event))
            except Strange:
                self._lose()
                return

    def _add(self, *pieces: str) -> None:
        shown = [each for each in pieces if each]
        if shown and not self.lost:
            self._pieces += msgspec.json.encode(shown)[1:-1] + b","
        if len(self._pieces) + self._arguments_bytes > _MOST_BYTES:
            self._lose()

    def _lose(self) -> None:
        self.lost = True
        self.strayed |= self._given is not None and self.teller.repeats_text
        self._pieces.clear()

    @property
    def leads_on(self) -> bool:
        """Whether another backend could go on from where it is, if somebody tells its token ids."""
        self._read()
        if self.thinks and self._held_back:
            return False  # nobody knows whether text is held back of a thought, too
        behind = self._behind_thought or self._call is not None
        return self.teller.begun and not (behind or self.lost or self.strayed)

    @property
    def thinks(self) -> bool:
        """Whether what was shown is a thought, which its owner has to see begin in the prompt."""
        self._read()
        return self.teller.thinks

    @property
    def pieces(self) -> list[str]:
        """The text that was shown, by its frames; since the last tool call began."""
        self._read()
        kept: list[str] = _PIECES.decode(b"[%b]" % bytes(self._pieces).removesuffix(b","))
        return [*kept, self._open] if self._open else kept

    @property
    def is_plain(self) -> bool:
        """Whether the answer has begun, and nobody offers tools, as far as its owner was told."""
        return bool(self.pieces) and not (self.may_call or self.thinks)

    @property
    def said_tokens(self) -> int:
        """How many tokens of the reply were said, or fewer: a frame may have several."""
        return len(self.pieces)

    @property
    def again(self) -> str:
        """What was shown beyond the last place to go on, and will be said again."""
        if not self._held_back:
            return ""
        pieces = self.pieces
        return "".join(pieces)[max(ends_of(pieces, self._held_back), default=0) :]

    @property
    def tail(self) -> str:
        """The last characters that were shown, as many as a part of a stop string can have."""
        return "".join(self.pieces)[-self._held_back :] if self._held_back else ""

    def ids_are(
        self, prompt: list[int], reply: list[int], tokens: list[str], pieces: list[str]
    ) -> bool:
        """Take the ids of the prompt and of the `pieces` that were shown, and tell whether they are proven.

        `tokens` are the reply's as text. Nobody can go on where more was shown meanwhile.
        """
        prompt_tokens = self.teller.prompt_tokens
        proven = prompt_tokens in (None, len(prompt)) and bool(prompt) and len(reply) == len(tokens)
        trimmed = self.thinks
        seam = fits(pieces, tokens, self._held_back, trimmed=trimmed) if proven else None
        if seam is not None and pieces == self.pieces:
            self._reached = Reached(prompt, reply[:seam], self.again)
            self._reached_at = len(self._pieces)
        return seam is not None

    def reached(self) -> Reached | None:
        """Return from where another backend can go on; None where nobody told that for sure."""
        self._read()
        return self._reached if self._reached_at == len(self._pieces) else None

    def go_back(self, reached: Reached, head: bytes) -> None:
        """Another backend goes on from there."""
        self._given, self._told_tokens, self.proven = reached, 0, False
        self._finish = None
        self.left = reached.again
        self._awaits_mark = self.thinks
        if self._held_back:
            pieces = self.pieces
            seam = sum(map(len, pieces)) - len(reached.again)
            kept, self._open = up_to(pieces, seam, self._held_back)
            self._pieces.clear()
            self._add(*kept)
            self._reached_at = len(self._pieces)

    def retold(self, frame: bytes) -> bytes:
        """Return a frame of a chat that goes on as events of the stream; an error is left as it is."""
        payload = frame.partition(b"data: ")[2]
        chunk = decode_or_none(CHUNK, payload)
        if chunk is None:
            if b'"error"' in payload:
                return frame
            self.strayed |= payload.strip() not in _NO_CHUNKS
            return b""
        given = self._given
        assert given is not None
        if chunk.prompt_token_ids is not None:
            self.proven = chunk.prompt_token_ids == [*given.prompt, *given.reply]
            self.strayed |= not self.proven
        events = b"".join([self._choice(each) for each in chunk.choices if self.proven])
        if self._finish is not None and (chunk.usage or not self.teller.counts_thoughts):
            details = chunk.usage and chunk.usage.completion_tokens_details
            events += self._end(given, self._finish, details or Details())
        return events

    def _choice(self, choice: Choice) -> bytes:
        delta, finish = choice.delta, choice.finish_reason
        thought = delta.reasoning or delta.reasoning_content or ""
        called = bool(delta.tool_calls) and not self.may_call
        if thought or self.closes in (choice.token_ids or ()):
            self._awaits_mark = False
        too_soon = self._awaits_mark and (delta.content or delta.tool_calls)
        if called or too_soon or (thought and not self.teller.may_think):
            self.strayed = True
            return b""
        if finish is not None and finish not in _GOOD:
            return ABORTED
        self._told_tokens += len(choice.token_ids or ())
        events = self._more(thought, delta)
        try:
            events += b"".join([self._called(each) for each in delta.tool_calls or ()])
        except Strange:
            self.strayed = True
            return b""
        if finish is None:
            return events
        if self.left:  # it ends before it has said all that the client was shown
            self.strayed = True
            return b""
        self._finish = choice
        return events

    def _more(self, thought: str, delta: Delta) -> bytes:
        """Return more of a thought or text as events of the stream, and the end of a thought before a text or call."""
        events, content = b"", self._beyond(delta.content or "")
        if thought:
            self._add(thought)
            events = self.teller.thought(thought)
        if self.teller.thinks and (content or delta.tool_calls):
            events += self.teller.closed("".join(self.pieces))
            self._behind_thought = True
            self._pieces.clear()
        if self._held_back and delta.content:  # what it says again tells where its tokens end, too
            self._add(self._open + delta.content)
            self._open, self._reached = "", None
        elif content:
            self._add(content)
        return events + self.teller.more(content) if content else events

    def _end(self, given: Reached, last: Choice, details: Details) -> bytes:
        """Return the events that end the reply; how much of it was thought is told behind its last choice."""
        self._finish, before = None, len(given.reply)
        thought = before + (details.reasoning_tokens or 0) if self.teller.counts_thoughts else 0
        spent = Spent(len(given.prompt), before + self._told_tokens, thought)
        stop = last.stop_reason if isinstance(last.stop_reason, str) else None
        return self.teller.end(last.finish_reason or "stop", stop, "".join(self.pieces), spent)

    def _beyond(self, text: str) -> str:
        """Return text without what is said again."""
        left = self.left
        self.strayed |= not (text.startswith(left) or left.startswith(text))
        self.left = left[len(text) :]
        return text[len(left) :]

    def _called(self, call: ToolCall) -> bytes:
        """Return a part of a tool call as events of the stream; nobody can go on from then on.

        Raises:
            Strange: it belongs to no call that is open.
        """
        events, function = b"", call.function or Function()
        if call.index != self._call:
            if call.id is None or function.name is None:
                raise Strange
            self._call = call.index
            events = self.teller.call(call.id, function.name, "".join(self.pieces))
            self._pieces.clear()
        if function.arguments:
            self._arguments_bytes += len(function.arguments)
            self._add()
            events += self.teller.arguments(function.arguments)
        return events
