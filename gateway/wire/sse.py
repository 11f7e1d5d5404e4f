"""Token streams on the wire: judged frame by frame, passed on as the same bytes.

A stream is a success only if it says so itself: every choice got a good finish reason, or the
dialect's terminal event came. `[DONE]` alone proves nothing: vLLM sends it after an error frame and
after requests it aborted. So a stream that is no success gets one error frame before its end.

    feed --ordinary frames only----------------------------> the same bytes object
      |--anything else--> whole frames --judged one by one-> same, changed or dropped frame
      `--half a frame---> held back (64 KiB; beyond that passed on, judged by its two ends)

Two chunks wait for the one behind them. vLLM puts `system_fingerprint` on the usage chunk, and without
`include_usage` on the chunks with a finish reason. So where the client gets no usage chunk, the last finish
reason waits for it and takes its fingerprint. A usage chunk that comes before all choices have finished counts
a reply that broke off, if `[DONE]` follows: another backend may go on with it (`resume.stream`).
"""

from __future__ import annotations

import re
from typing import Final

from gateway.core.errors import ReplyTooLarge
from gateway.core.types import Dialect, Usage
from gateway.wire.chunks import Shape
from gateway.wire.frames import (
    CHUNK,
    DELTA,
    EVENT,
    OPENAI,
    STARTED,
    Event,
    Response,
    error_frame,
    is_whole,
    json_usage,
    stamped,
    usage_told,
)
from gateway.wire.objects import decode_or_none, is_given
from gateway.wire.replies import Fault, upstream_fault

HEARTBEAT: Final = b": keep-alive\n\n"
HOLD_BYTES: Final = 64 * 1024
# Source: vLLM's FinishReason, OpenAI reference. `abort` and `error` are the engine's failures.
GOOD_REASONS: Final = frozenset(
    {"stop", "length", "tool_calls", "function_call", "content_filter", "repetition"}
)

CUT_SHORT: Final = Fault(
    502, "server_error", "backend_error", "The backend ended the stream before it was complete."
)
ABORTED: Final = Fault(502, "server_error", "backend_error", "The backend aborted the request.")
# How a backend ends what it gives up itself: one that crashes comes to neither.
IN_ORDER: Final = (ABORTED, CUT_SHORT)
DONE: Final = b"data: [DONE]\n\n"
_FRAME_END: Final = re.compile(rb"\n\r?\n")
_PLAIN, _RESPONSES = Dialect.PLAIN, Dialect.RESPONSES  # looked up once: 0.15 us before Python 3.12
_CR: Final = ord("\r")
_DONE_BYTES: Final = 16  # at most, of `[DONE]` and the white space around it
_TAIL_BYTES: Final = 4096  # finish reason and usage are near the end of a frame too long to hold

# What marks an ordinary frame, and how many line ends it has; PLAIN streams are rare and have none.
_ORDINARY: Final = {
    Dialect.CHAT: (b'"choices":[{', 2),
    Dialect.COMPLETIONS: (b'"choices":[{', 2),
    Dialect.RESPONSES: (b".delta\ndata: {", 3),
    Dialect.MESSAGES: (b"event: content_block_delta\ndata: {", 3),
    Dialect.PLAIN: (b"\0", 1),
}

# How a frame that only carries a token, or a role, ends; the last one is vLLM's since 0.33.
_TOKEN_ENDS: Final = (
    *(b"}]}\n\n", b'"usage":null}\n\n', b'],"prompt_token_ids":null}\n\n'),
    b'}],"kv_transfer_params":null}\n\n',
)


class StreamWatch:
    """One stream. Its output and verdict depend on the bytes only, not on how they were cut.

    `complete`: it was a success. `failed`: it was none. `fault`: the error that the client reads of it,
    for a reply that can still have a status of its own.
    """

    cut: Fault | None = None  # why it broke off, where another backend may go on
    excess: ReplyTooLarge | None = None  # never: a stream may be as long as its client reads it

    __slots__ = (
        "began", "complete", "ended", "events", "failed", "fault", "shape", "usage",
        "_aborted", "_carry", "_choices", "_dialect", "_finished", "_held", "_hide_usage", "_learns", "_lines",
        "_long", "_mark", "_openai", "_recent", "_request_id", "_sequence", "_single",
    )  # fmt: skip

    def __init__(
        self, dialect: Dialect, *, choices: int, hide_usage: bool, request_id: str
    ) -> None:
        self.complete = False
        self.failed = False
        self.fault: Fault | None = None
        self.usage: Usage | None = None
        self.began: Usage | None = None  # the prompt's tokens, if they are told at the start
        self.events = 0
        self.shape = Shape()  # of ordinary frames: one that fits is counted, and not fed
        self._dialect = dialect
        self._openai = dialect in OPENAI
        self._mark, self._lines = _ORDINARY[dialect]
        self._choices = choices
        self._single = self._openai and choices == 1 and dialect is not _PLAIN
        # A Responses event has a sequence number: no two are alike.
        self._learns = dialect is not _RESPONSES
        self._hide_usage = hide_usage
        self._request_id = request_id
        self._carry = b""
        self._held = b""  # a chunk that waits for the next one
        self._long: tuple[bytes, bytes] | None = None  # head and tail of a frame too long to hold
        self._finished: set[int] = set()
        self._aborted = False
        self.ended = False  # the ending was written; nothing may follow
        self._sequence = -1
        self._recent = b""  # frames not looked at for their sequence number

    def ends_here(self) -> None:
        """Have it end where it breaks off: no other backend goes on."""

    @property
    def answering(self) -> bool:
        """Whether its engine has begun a reply, though it may have shown nothing of it."""
        return self.began is not None

    @property
    def between_frames(self) -> bool:
        """Whether what was passed on ends with a whole frame, so that a comment may follow."""
        return self._long is None and not self.ended

    def by_sight(self, data: bytes) -> bytes | None:
        """Count the tokens of a read that holds nothing else, and return it; None: feed it."""
        if self.shape.fits(data):
            self.events += 1
            return data
        several = self.shape.split(data)
        self.events += len(several)
        return data if several else None

    def feed(self, data: bytes) -> bytes:
        """Take bytes as they came; return what may be sent on now."""
        whole = not (self._carry or self._long or self.ended)
        if whole and self._single and data.find(b"\n") == len(data) - 2:
            # Most reads: one frame, and of most, one more token of the only choice. 0.4 us.
            if not self._held:
                reason = data.rfind(b'"finish_reason":')
                if (
                    reason > 0
                    and data.startswith(b"null", reason + 16)
                    and data.rfind(b'"finish_reason":"', 0, reason) < 0
                    and data.endswith(_TOKEN_ENDS)
                ):
                    # The first tells the role, and is like no other.
                    if self.events and self._learns:
                        self.shape.learn(data)
                    self.events += 1
                    return data
            if data.startswith(b"data: ") and data.endswith(b"\n\n"):
                self.shape.forget()
                return self._judge_chunk(data, data[6:])
        if whole and not self._held and self._only_tokens(data):
            return data
        self.shape.forget()
        return self._feed_slowly(data)

    def _only_tokens(self, data: bytes) -> bool:
        """Whether these bytes are whole frames that only carry tokens. If so, count those."""
        if self._openai and data.endswith(DONE):
            return False
        lines = data.count(b"\n")
        if lines == self._lines and (self._is_token(data) if self._openai else self._mark in data):
            frames = 1
        else:
            frames = self._ordinary_frames(data, lines)
        if not frames or not data.endswith(b"\n\n"):
            return False
        self.events += frames
        if frames == 1 and self._learns:
            self.shape.learn(data)
        self._recent = data
        return True

    # Ordinary frames are searched, not parsed. Any other is parsed, so to miss an ordinary one costs time only.
    # `rfind` is three times as fast as `in` on frames of this size.

    @staticmethod
    def _is_token(frame: bytes) -> bool:
        return (
            frame.endswith(_TOKEN_ENDS)
            and frame.rfind(b'"finish_reason":null') > 0
            and frame.rfind(b'"finish_reason":"') < 0
        )

    def _ordinary_frames(self, data: bytes, lines: int) -> int:
        """Return how many frames these bytes hold if all of them only carry tokens, else 0."""
        frames = data.count(self._mark)
        if lines != frames * self._lines:
            return 0
        if self._openai and (
            data.count(b'"finish_reason":null') != frames
            or data.count(b'"finish_reason":') != frames
            or b'"usage":{' in data
        ):
            return 0
        return frames

    def close(self) -> bytes:
        """Take note that the backend ended its stream in order; return the rest and the ending."""
        if self.ended:
            return b""
        frame = self._carry.rstrip(b"\r\n") + b"\n\n"  # a last frame may lack its blank line
        rest = self._judge(frame) if is_whole(frame) else b""
        return rest + self.broken(CUT_SHORT)

    def broken(self, fault: Fault) -> bytes:
        """Take note that the stream broke off; return the ending that tells why, or only ends what was complete."""
        self._carry = b""
        cut = b"\n\n" if self._long is not None and not self.ended else b""
        return cut + self._end(fault)

    # --- frames -----------------------------------------------------------------------------------

    def _feed_slowly(self, data: bytes) -> bytes:
        out: list[bytes] = []
        if self._long is not None:
            data = self._pass_long(self._long, data, out)
        held = len(self._carry)
        if not held and _CR not in data:  # as vLLM writes them
            *whole, carry = data.split(b"\n\n")
            out += [self._judge(lines + b"\n\n") for lines in whole]
            return self._hold(carry, out)
        buffer = self._carry + data
        start = 0
        for end in _FRAME_END.finditer(buffer, max(0, held - 3)):
            out.append(self._judge(buffer[start : end.end()]))
            start = end.end()
        return self._hold(buffer[start:], out)

    def _hold(self, carry: bytes, out: list[bytes]) -> bytes:
        """Hold half a frame back, or pass its beginning on when it is too long; return what may go out."""
        if len(carry) > HOLD_BYTES:
            out.append(b"" if self.ended else carry)
            self._long = (carry[:_TAIL_BYTES], carry[-_TAIL_BYTES:])
            carry = b""
        self._carry = carry
        return b"".join(out)

    def _pass_long(self, ends: tuple[bytes, bytes], data: bytes, out: list[bytes]) -> bytes:
        """Pass on more of a frame too long to hold; return what follows it."""
        head, tail = ends
        seen = tail + data
        found = _FRAME_END.search(seen, max(0, len(tail) - 3))
        at = found.end() - len(tail) if found else len(data)
        if not self.ended:
            out.append(data[:at])
        if found is None:
            self._long = (head, seen[-_TAIL_BYTES:])
            return b""
        self._long = None
        if not self.ended:
            self._judge_ends(head, seen[: found.end()][-_TAIL_BYTES:])
        return data[at:]

    def _judge(self, frame: bytes) -> bytes:
        """Return what is to be sent for one whole frame."""
        if self.ended:
            return b""
        json = frame.removeprefix(b"data: ")
        if self._openai and len(json) < len(frame) and json.find(b"\n") == len(json) - 2:
            return self._judge_chunk(frame, json)  # as vLLM writes them: nothing to take apart
        payload: list[bytes] = []
        kept: list[bytes] = []
        lines = [line for line in frame.splitlines() if line]
        for line in lines:
            field = line.partition(b":")[0]
            if field == b"data":
                payload.append(line[5:].removeprefix(b" "))
            if field not in (b"id", b"retry"):  # these change how clients reconnect, and break some
                kept.append(line)
        if len(kept) != len(lines):
            frame = b"\n".join(kept) + b"\n\n"
        if not payload:
            has_comment = any(line.startswith(b":") for line in kept)
            return frame if has_comment else b""  # an event without data breaks the SDKs' readers
        if self._openai:
            return self._judge_chunk(frame, b"\n".join(payload))
        return self._judge_event(frame, b"\n".join(payload))

    def _judge_chunk(self, frame: bytes, payload: bytes) -> bytes:
        if len(payload) <= _DONE_BYTES and payload.strip() == b"[DONE]":
            return self._end(CUT_SHORT, done=True)
        held, self._held = self._held, b""
        chunk = decode_or_none(CHUNK, payload)
        if chunk is None:
            return held + frame
        if (chunk.error and is_given(chunk.error)) or chunk.object == "error":
            return held + self._backends_error(payload)
        counts = is_given(chunk.usage)
        if counts:
            self.usage = usage_told(chunk.usage) or self.usage
        if not chunk.choices:
            if self._hide_usage and chunk.choices is not None and counts:
                return stamped(held, chunk.system_fingerprint)
            if counts and not self.complete:
                self._held, frame = frame, b""
            return held + frame
        self.events += 1
        for choice in chunk.choices:
            self._note_finish(choice.index, choice.finish_reason)
        if self._hide_usage and self.complete and not held:
            self._held, frame = frame, b""
        return held + frame

    def _judge_event(self, frame: bytes, payload: bytes) -> bytes:
        event = decode_or_none(EVENT, payload)
        if event is None:
            return frame
        if event.is_error:
            return self._backends_error(payload)
        if self._dialect is _RESPONSES:
            return self._judge_response(frame, event)
        return self._judge_message(frame, event)

    def _judge_response(self, frame: bytes, event: Event) -> bytes:
        if event.sequence_number is not None:
            self._sequence, self._recent = event.sequence_number, b""
        if event.type.endswith(".delta"):
            self.events += 1
        elif event.type in ("response.completed", "response.incomplete"):
            answer = event.response or Response()
            self.usage = usage_told(answer.usage) or self.usage
            self._aborted = answer.status in ("cancelled", "failed")
            if self._aborted:
                return self._end(ABORTED)
            self._succeed()
        elif event.type == "response.failed":
            self.failed = self.ended = True
        return frame

    def _judge_message(self, frame: bytes, event: Event) -> bytes:
        if event.type == "content_block_delta":
            self.events += 1
        elif event.type == "message_start" and is_given(event.message):
            started = decode_or_none(STARTED, event.message)
            self.began = None if started is None else usage_told(started.usage)
        elif event.type == "message_delta":
            delta = decode_or_none(DELTA, event.delta) if is_given(event.delta) else None
            self._aborted = delta is not None and delta.stop_reason is None
            self.usage = usage_told(event.usage, self.began) or self.usage
        elif event.type == "message_stop":
            if self._aborted:
                return self._end(ABORTED)
            self._succeed()
        return frame

    def _judge_ends(self, head: bytes, tail: bytes) -> None:
        """Judge a frame that was passed on unseen by its two ends."""
        self.usage = json_usage(tail) or self.usage
        if self._openai:
            self.events += 1
            index, reason = _INDEX.search(head), _REASON.search(tail)
            if index and reason:
                self._note_finish(int(index[1]), reason[1].decode())
        elif _TERMINAL.match(head):
            self._succeed()

    # --- the verdict ------------------------------------------------------------------------------

    def _note_finish(self, index: int, reason: str | None) -> None:
        if reason in GOOD_REASONS:
            if 0 <= index < self._choices:
                self._finished.add(index)
            # An audio stream has a finish reason for every piece of sound: only its end tells.
            whole = len(self._finished) == self._choices and self._dialect is not _PLAIN
            self.complete = whole and not self.failed
        elif reason is not None:
            self._aborted = True

    def _succeed(self) -> None:
        self.ended = True
        self.complete = not self.failed

    def _end(self, fault: Fault, *, done: bool = False) -> bytes:
        """Write the ending, after an error frame where the stream was no success."""
        if self.ended:
            return b""
        if done and self._dialect is _PLAIN and self._finished and not self._aborted:
            self.complete = not self.failed
        out, self._held = self._held, b""
        if self._aborted:
            self.complete = False
        if not (self.complete or self.failed):
            self.failed = True
            out += self._tell(ABORTED if self._aborted else fault)
        self.ended = True
        return out + DONE if self._openai else out

    def _backends_error(self, payload: bytes) -> bytes:
        """Return the backend's own error frame in the client's form; nothing for any after the first."""
        if self.failed:
            return b""
        fault = upstream_fault(200, payload, self._dialect)
        self.failed, self.complete = True, False
        return self._tell(fault)

    def _tell(self, fault: Fault) -> bytes:
        """Write an error frame."""
        self.fault = fault
        return error_frame(fault, self._dialect, self._request_id, self.next_sequence)

    @property
    def next_sequence(self) -> int:
        """The number of the next event of a response."""
        last = _SEQUENCE.findall(self._recent)
        return (int(last[-1]) if last else self._sequence) + 1


_INDEX: Final = re.compile(rb'"index":\s*(\d{1,9})')
_REASON: Final = re.compile(rb'"finish_reason":\s*"(\w+)"')
_SEQUENCE: Final = re.compile(rb'"sequence_number":\s*(\d{1,15})')
_TERMINAL: Final = re.compile(rb"event: *response\.(?:completed|incomplete)\b")
