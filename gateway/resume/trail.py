"""What is kept of a stream so that another backend can go on with it: its token ids. Pure.

A backend that is asked to (`return_token_ids`) tells the ids of the prompt in a stream's first frame,
and in each frame those of the tokens that it carries. They are taken out on the way to the client, who
gets the frames as if nobody had asked:

    "prompt_token_ids":[2,88,278]    ->  "prompt_token_ids":null     kept
    "token_ids":[713]                ->  "token_ids":null            kept
    "delta":{},...,"token_ids":[713] ->  no frame (`silent`)         kept

vLLM sends the last kind only to who asks for ids: a parser of tool calls swallowed the text of these tokens.

A text may lag behind its tokens: a character that is not whole yet, and what a parser holds back, is
not shown. So a stream goes on after the last token that showed text, and not after the last that came
(`resume.seam`): vLLM writes a prompt that ends within a character as text of the reply, all of it. (Seen
with 0.32; at 689 cuts after a token that showed text, all went on exactly.)
"""

from __future__ import annotations

from typing import Final

import msgspec

from gateway.core.types import Dialect
from gateway.resume.seam import Reached, Seam
from gateway.resume.shown import REASONING, shown_by_chat, shown_by_completion
from gateway.resume.sight import CHOICES, IDS, Sight
from gateway.wire.chunks import LINES, MAX_CHUNK, SIZE_LINES, Shape
from gateway.wire.objects import decode_or_none

_MOST_UNREAD: Final = 16  # frames
_NO_IDS: Final = b'"token_ids":null'
_SILENT: Final = b'"delta":{},"logprobs":null,"finish_reason":null,'  # before ids: nothing to show
_PROMPT_IDS: Final = b'"prompt_token_ids":['
_NO_PROMPT_IDS: Final = b'"prompt_token_ids":null'
_NOTHING: Final = b'"delta":{"role":"assistant","content":""}'  # how vLLM begins: it shows nothing
_TOKENS: Final = msgspec.json.Decoder(list[int])
_STRING: Final = msgspec.json.Decoder(str)
_COMMA: Final = ord(",")


class Trail(Sight):
    """The trail of one stream. Its owner hands it every read: by sight, else frame by frame."""

    __slots__ = (
        "_barred", "_follows", "_given", "_holds_back", "_ids", "_kind_chars", "_last_seam", "_prompt", "_reasoned",
        "_shape", "_shows_whole", "_unread", "kind", "parsed", "shows", "silent", "strayed",
    )  # fmt: skip

    def __init__(
        self, dialect: Dialect, shape: Shape, held_back_chars: int = 0, *, parsed: bool = False
    ) -> None:
        """`shape` is what the watch learns of the frames that the client gets.

        `held_back_chars` is how much the engine keeps back, to look for stop strings in it. `parsed` tells
        that it looks for tool calls, and so may keep back any part of the answer.
        """
        super().__init__()
        self._shape = shape
        self.parsed = parsed
        self.shows = shown_by_chat if dialect is Dialect.CHAT else shown_by_completion
        self.kind = ""  # of what was shown last: the name of its field
        self._kind_chars = 0  # so much of that kind was noted since another one
        self._reasoned = False
        self._prompt: bytes | None = None  # as it was written, without brackets
        # The prompt that the backend which goes on was given; None once it has told its prompt.
        self._given: bytes | None = None
        self.silent = False  # the last whole frame had ids only, and shows nothing
        self.strayed = False  # that backend told another prompt
        self._barred = False  # it showed what cannot be gone on with
        self._ids = bytearray()  # of the reply, as they were written, with a comma after each
        self._holds_back = held_back_chars > 0
        self._shows_whole = not (self._holds_back or parsed)  # all text of a token, with the token
        self._last_seam = Seam(held_back_chars)
        self._follows = False  # the seam is behind all ids, and behind those that `tell` adds
        # Frames that were not looked at; the ids until their end, and whether they have one only. One that
        # is empty stands for tokens that were told: the seam followed them until there.
        self._unread: list[tuple[bytes, int, bool]] = []

    def tell(self, chunk: bytes) -> bytes | None:
        """Keep the id of a chunk that is one more token, and return the chunk without it; None: see `tell_several`.

        Each token pays for this, so it uses what is fast in CPython, as `wire.chunks` does.
        """
        size = len(chunk)
        line = SIZE_LINES[size] if size < MAX_CHUNK else b""
        beginning = line + self._head
        text, _, rest = chunk.removeprefix(beginning).partition(b'"')
        new = rest.removeprefix(self._middle).removesuffix(self._end)
        same_bytes = len(beginning) + self._around_bytes
        if same_bytes + len(text) + len(new) != size or not (line and text and new.isdigit()):
            return None
        if not (self._follows or self._may_follow()):
            return None
        ids = self._ids
        ids += new
        ids += b","
        line = LINES[self._shown_bytes + len(text)]
        return b"".join((line, self._shown, text, self._after))

    def _may_follow(self) -> bool:
        """Whether the text of a token that shows some now is all of its text; asked before `tell` adds its id."""
        if self.parsed:
            self._read()
        self._follows = self._shows_whole
        return self._follows

    @property
    def _seam(self) -> Seam:
        """Where another backend can go on."""
        self._read()
        return self._last_seam

    def _settle(self) -> None:
        """Note where the seam is, before anything but `tell` comes: that does not move it with each token."""
        if self._follows:
            self._follows = False
            self._unread.append((b"", len(self._ids), True))

    def tell_several(self, data: bytes) -> list[bytes]:
        """Return chunks of the learnt shape without their ids, which are kept; nothing: `data` must be parsed.

        They may be several in one read, or one that `tell` does not take: with several ids, quotes or no text.
        """
        if self._prompt is None:  # of an engine that tells no ids there is nothing to keep
            return self._shape.split(data)
        parts = self._apart(data)
        if not parts or not self._read():
            return []
        for text, ids in parts:
            self._keep(text, ids)
        shown, after, shown_bytes = self._shown, self._after, self._shown_bytes
        return [b"".join((LINES[shown_bytes + len(text)], shown, text, after)) for text, _ in parts]

    def _keep(self, text: bytes, ids: bytes) -> None:
        """Keep ids, and behind which of them another backend can go on."""
        self._ids += ids + b","
        if self._shows_whole and text and _COMMA not in ids:
            self._last_seam.ids_bytes = len(self._ids)
        elif text:
            self._show(b'"%b"' % text, single=_COMMA not in ids)

    def _show(self, written: bytes, *, single: bool) -> None:
        """Note text as it was written, of tokens behind which another backend may not be able to go on."""
        text = decode_or_none(_STRING, written)
        if text is None:
            self._barred = True
        else:
            whole = single and not self._doubts(self.kind)
            self._kind_chars += len(text)
            self._last_seam.show(text, len(self._ids), whole=whole)

    def _doubts(self, kind: str) -> bool:
        """Whether a parser of tool calls may hold back what follows text of this kind."""
        return self.parsed and kind not in REASONING

    def strip(self, frame: bytes) -> bytes:
        """Keep the ids of a whole frame; return it as it is without them."""
        self.silent = False
        if self._prompt is None or self._given is not None:
            frame = self._take_prompt(frame)
        if self._given is not None:  # it is not proven, and no part of the stream
            return frame
        before, mark, rest = frame.rpartition(IDS)
        if not mark:
            shows = frame.find(CHOICES) >= 0 and frame.find(_NOTHING) < 0
            if shows and self._prompt is not None:
                self._leave_unread(frame, single=False)  # its text is said again
            return frame
        if (told := self._tell_frame(frame)) is not None:
            return told
        self.silent = before.endswith(_SILENT)
        self._settle()
        ids, _, after = rest.partition(b"]")
        if ids:
            self._ids += ids + b","
        self.learn(frame)
        frame = b"".join((before, _NO_IDS, after))
        self._leave_unread(frame, single=_COMMA not in ids)
        return frame

    def _leave_unread(self, frame: bytes, *, single: bool) -> None:
        """Keep a frame, whose ids are kept, until somebody asks what it shows: most streams end before."""
        self._settle()
        self._unread.append((frame, len(self._ids), single))
        if len(self._unread) > _MOST_UNREAD:
            self._read()

    def _tell_frame(self, frame: bytes) -> bytes | None:
        """Return a frame of the learnt shape, from a read with others, without its ids; None: it must be parsed."""
        if not self._end or len(frame) >= MAX_CHUNK or frame.find(self._middle) < 0:
            return None
        chunk = b"%b%b\r\n" % (LINES[len(frame)], frame)
        told = self.tell(chunk)
        if told is None:
            told = b"".join(self.tell_several(chunk))
        # Not `inside`: it may be longer than 4 KiB now.
        return told.partition(b"\r\n")[2][:-2] or None

    def _take_prompt(self, frame: bytes) -> bytes:
        before, mark, rest = frame.partition(_PROMPT_IDS)
        if not mark:
            return frame
        ids, _, after = rest.partition(b"]")
        if self._given is None:
            self._prompt = ids
        else:
            self.strayed, self._given = ids != self._given, None
        return b"".join((before, _NO_PROMPT_IDS, after))

    def give_up(self, frame: bytes) -> bytes | None:
        """Return half a frame without the ids of its prompt, which are too many to be kept; None: it has none."""
        before, mark, rest = frame.partition(_PROMPT_IDS)
        if not mark or b"]" in rest:
            return None
        self._barred = True
        return before + mark

    def _read(self) -> bool:
        """Look for text in the frames that were not read; whether the stream can go on so far."""
        self._settle()
        if not self._unread:
            return not self._barred
        for frame, ids_bytes, single in self._unread:
            if not frame:
                self._last_seam.ids_bytes = ids_bytes
                continue
            shown = self.shows(frame)
            if shown is None:
                self._barred = True
                break
            if shown.text:
                if shown.earlier_chars or shown.kind != self.kind:
                    self.kind, self._kind_chars = shown.kind, 0
                self._kind_chars += len(shown.text) - shown.earlier_chars
                self._reasoned |= shown.reasoning
                whole = single and not shown.earlier_chars and not self._doubts(shown.kind)
                self._last_seam.show(shown.text, ids_bytes, whole=whole)
        self._unread.clear()
        self._shows_whole = not (self._holds_back or self._doubts(self.kind))
        return not self._barred

    @property
    def proven(self) -> bool:
        """Whether the backend that writes now has told that its prompt is the right one."""
        return self._prompt is not None and self._given is None and not self.strayed

    @property
    def leads_on(self) -> bool:
        """Whether another backend can go on from where it is."""
        if self._prompt is None or self.strayed or not self._read() or self._seam.lost:
            return False
        return not (self.reasoned and self._holds_back)

    @property
    def reasoned(self) -> bool:
        """Whether reasoning was shown."""
        self._read()
        return self._reasoned

    @property
    def is_plain(self) -> bool:
        """Whether the answer has begun: any reasoning is over."""
        return self.kind == "content"

    @property
    def counts(self) -> tuple[int, int] | None:
        """How many tokens the prompt has, and the reply so far; None: it does not know."""
        if self._prompt is None or self._given is not None:
            return None
        return self._prompt.count(b",") + 1, self.said_tokens

    @property
    def said_tokens(self) -> int:
        """How many tokens of the reply came."""
        return self._ids.count(b",")

    @property
    def tail(self) -> str:
        """The last characters that were shown, as many as a part of a stop string can have."""
        return self._seam.tail

    @property
    def again(self) -> str:
        """What was shown beyond the seam, and will be said again."""
        return self._seam.again

    @property
    def unsure(self) -> list[int]:
        """The tokens behind the seam, some of which showed `again`; none where their text is not all of it."""
        if self._holds_back or not self._seam.again:
            return []
        behind = bytes(self._ids[self._seam.ids_bytes : self._seam.shown_ids_bytes])
        return _numbers(behind.removesuffix(b",")) or []

    def shown_of(self, text: str) -> str | None:
        """Return what was shown of the text of the unsure tokens, from its beginning on; None: nobody can tell.

        Marks around reasoning are not shown. Behind them only what is said once has a certain place.
        """
        again = self._seam.again
        for shown in (again, again.removeprefix(" ")):  # some tokenizers drop it
            if not self.reasoned and text.startswith(shown):
                return shown
            if self.reasoned and (end := self._end_of(shown, text)) is not None:
                return text[:end]
        return None

    def _end_of(self, shown: str, text: str) -> int | None:
        """Return where what was shown ends in a text with marks; None: it is not there, or its end is there twice."""
        earlier, last = shown[: -self._kind_chars], shown[-self._kind_chars :]
        begun = text.find(earlier)
        at = text.find(last, begun + len(earlier))
        return at + len(last) if min(begun, at) >= 0 and at == text.rfind(last) else None

    def put_seam(self, tokens: int, again: str) -> None:
        """Let so many of the unsure tokens be before the seam; `again` was shown beyond it."""
        behind = bytes(self._ids[self._seam.ids_bytes :])
        passed = sum(len(each) + 1 for each in behind.split(b",")[:tokens])
        shown_ids_bytes = self._seam.shown_ids_bytes
        self._seam.begin(self._seam.ids_bytes + passed)
        if again:
            self._seam.show(again, shown_ids_bytes, whole=False)

    def reached(self) -> Reached | None:
        """Return the place from which another backend can go on; None where that would not be exact."""
        if self._prompt is None or not self.leads_on:
            return None
        reply = bytes(self._ids[: self._seam.ids_bytes])
        ids = _numbers(self._prompt), _numbers(reply.removesuffix(b","))
        return None if ids[0] is None or ids[1] is None else Reached(ids[0], ids[1], self.again)

    def go_back(self, reached: Reached, head: bytes) -> None:
        """Forget what came after, as another backend goes on from there; `head` is how its frames begin."""
        self._ids = bytearray(b"".join(b"%d," % each for each in reached.reply))
        self._given = (b"%b,%b" % (self._prompt or b"", bytes(self._ids))).removesuffix(b",")
        self._seam.begin(len(self._ids))
        self._unread.clear()
        self.forget(head)


def _numbers(written: bytes) -> list[int] | None:
    return decode_or_none(_TOKENS, b"[%b]" % written)  # type: ignore[no-any-return]
