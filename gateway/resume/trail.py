"""What is kept of a stream so that another backend can go on with it: its token ids. Pure.

A backend that is asked to (`return_token_ids`) tells the ids of the prompt in a stream's first frame,
and in each frame those of the tokens that it carries. They are taken out on the way to the client, who
gets the frames as if nobody had asked:

    "prompt_token_ids":[2,88,278]    ->  "prompt_token_ids":null     kept
    "token_ids":[713]                ->  "token_ids":null            kept

A text may lag behind its tokens: a character that is not whole yet, and what a parser holds back, is
not shown. So a stream goes on after the last token that showed text, and not after the last that came:
vLLM writes a prompt that ends within a character as text of the reply, all of it. (Seen with 0.32; at
689 cuts after a token that showed text, all went on exactly.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import msgspec

from gateway.core.types import Dialect
from gateway.resume.sight import Sight

# So many frames without text in a row are no character that is not whole yet, and no parser's doubt.
_MOST_UNSHOWN: Final = 16
_IDS: Final = b'"token_ids":['
_PROMPT_IDS: Final = b'"prompt_token_ids":['
_FRAME: Final = msgspec.json.Decoder(dict[str, Any])
_TOKENS: Final = msgspec.json.Decoder(list[int])


@dataclass(frozen=True, slots=True)
class Reached:
    """How far a stream has come: the ids of its prompt, and those of all that the client has seen."""

    prompt: list[int]
    reply: list[int]


class Trail:
    """The trail of one stream. Its owner hands it every read: by sight, else frame by frame."""

    __slots__ = (
        "_barred", "_given", "_ids", "_prompt", "_shown_bytes", "_shows", "_sight", "_unread", "strayed",
    )  # fmt: skip

    def __init__(self, dialect: Dialect) -> None:
        self._shows = _shows_chat if dialect is Dialect.CHAT else _shows_completion
        self._sight = Sight()
        self._prompt: bytes | None = None  # as it was written, without brackets
        self._given: bytes | None = None  # the prompt that a backend was given which goes on
        self.strayed = False  # it says that its prompt was another
        self._barred = False  # it showed what cannot be gone on with
        self._ids = bytearray()  # of the reply, as they were written, with a comma after each
        self._shown_bytes = 0  # of them, up to the last that is known to have shown text
        self._unread: list[tuple[bytes, int]] = []  # frames since then, and the ids until their end

    def tell(self, chunk: bytes) -> bytes | None:
        """Keep the ids of a chunk that is one more token; return it without them, None for others."""
        told = self._sight.tell(chunk)
        if told is None or self._given is not None or (self._unread and not self._read()):
            return None
        framed, text, ids = told
        self._ids += ids + b","
        if text:
            self._shown_bytes = len(self._ids)
        return framed

    def strip(self, frame: bytes) -> bytes:
        """Keep the ids of a whole frame; return it as it is without them."""
        if self._prompt is None or self._given is not None:
            frame = self._take_prompt(frame)
        before, mark, rest = frame.rpartition(_IDS)
        if not mark:
            return frame
        ids, _, after = rest.partition(b"]")
        if ids:
            self._ids += b"%b," % ids
        self._sight.learn(frame)
        frame = b"%b%bnull%b" % (before, mark[:-1], after)
        self._unread.append((frame, len(self._ids)))
        if len(self._unread) > _MOST_UNSHOWN:
            self._read()
        return frame

    def _take_prompt(self, frame: bytes) -> bytes:
        before, mark, rest = frame.partition(_PROMPT_IDS)
        if not mark:
            return frame
        told, _, after = rest.partition(b"]")
        if self._given is None:
            self._prompt = told
        else:
            self.strayed, self._given = told != self._given, None
        return b"%b%bnull%b" % (before, mark[:-1], after)

    def _read(self) -> bool:
        """Look for text in the frames that were not read; whether the stream can go on so far."""
        for frame, kept_bytes in self._unread:
            shown = self._shows(_FRAME.decode(frame[6:]))
            if shown is None:
                self._barred = True
                break
            if shown:
                self._shown_bytes = kept_bytes
        self._unread.clear()
        return not self._barred

    @property
    def proven(self) -> bool:
        """Whether the backend that writes now has told that its prompt is the right one."""
        return self._prompt is not None and self._given is None and not self.strayed

    def reached(self) -> Reached | None:
        """Return from where another backend can go on; None where that would not be exact."""
        if self._prompt is None or self.strayed or not self._read():
            return None
        reply = bytes(self._ids[: self._shown_bytes])
        return Reached(_numbers(self._prompt), _numbers(reply.removesuffix(b",")))

    def go_back(self, reached: Reached) -> None:
        """Forget what came after, as another backend goes on from there."""
        self._ids = bytearray(b"".join(b"%d," % each for each in reached.reply))
        self._given = (b"%b,%b" % (self._prompt or b"", bytes(self._ids))).removesuffix(b",")
        self._shown_bytes = len(self._ids)
        self._unread.clear()
        self._sight.forget()


def _numbers(written: bytes) -> list[int]:
    return _TOKENS.decode(b"[%b]" % written)


def _shows_chat(chunk: dict[str, Any]) -> bool | None:
    """Whether a chunk shows text; None: what it shows cannot be gone on with."""
    for choice in chunk.get("choices") or ():
        delta = choice.get("delta") or {}
        if delta.get("tool_calls") or delta.get("reasoning") or delta.get("reasoning_content"):
            return None
        if delta.get("content"):
            return True
    return False


def _shows_completion(chunk: dict[str, Any]) -> bool | None:
    return any(choice.get("text") for choice in chunk.get("choices") or ())
