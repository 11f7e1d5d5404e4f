"""A large JSON body, looked through while it comes: bounded, and cut short for the decoder.

A decoder takes what it is given in one piece, and a body of many tiny values takes it a thousand
times longer than one of long strings. So a body that is not small (`wire.small`) is scanned first,
step by step, each step at most a few milliseconds. The scan

- counts depth and values (`wire.tally`), and refuses a body as soon as one of them is over its limit;
- checks UTF-8, and the inside of what it cuts;
- notes where the values of the top level stand, for a rewrite that copies nothing else;
- writes the *skim*: the same JSON with long strings, long lists of token ids and long white space
  cut short, except where the parameter policy judges sizes (tools, schemas). The decoder judges the
  skim in place of the body: valid and refused are the same for both.

A string that was cut ends with U+0000, which no address, pattern or name may hold.
"""

from __future__ import annotations

import codecs
import re
from typing import Final

import msgspec

from gateway.core.errors import RequestError
from gateway.wire.objects import MAX_DEPTH, not_utf8, too_deep
from gateway.wire.tally import Tally

MAX_SCALAR_BYTES: Final = 1024  # Python reads no integer of more than 4,300 digits

KEPT_TEXT_BYTES: Final = 32 * 1024  # a string's part in the skim
LATE_TEXT_BYTES: Final = 256  # the same, once the skim is `LATE_SKIM_BYTES` long
LATE_SKIM_BYTES: Final = 8 << 20
_KEPT_SPACE_BYTES: Final = 64
_KEPT_INTEGERS_BYTES: Final = 64

_WINDOW: Final = 64 * 1024  # the most that one match looks at
_STEP_BYTES: Final = 2 * _WINDOW
_STEP_TOKENS: Final = 2000

# Runs are atomic groups, not possessive repeats of a group: those match too much before Python 3.11.5
# (github.com/python/cpython/issues/106052), which Debian 12 does not have.
_SPACE = rb"[ \t\r\n]*+"
_PLAIN = rb'[^"\\\x00-\x1f]++'
_ESCAPED = rb'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})'
_TOKEN: Final = re.compile(
    rb"%(space)b[,:]?%(space)b"
    rb'(?:("(?>(?:%(plain)b|%(escaped)b)*)")'
    rb"|([\[{])"
    rb"|([\]}])"
    rb"|((?>(?:-?(?:0|[1-9][0-9]*+)%(space)b,%(space)b){2,}))"  # integers, each with its comma
    rb'|([^ \t\r\n,:\[\]{}"]++))?' % {b"space": _SPACE, b"plain": _PLAIN, b"escaped": _ESCAPED}
)
_TEXT, _OPEN, _CLOSE, _INTEGERS, _SCALAR = 1, 2, 3, 4, 5
_INSIDE_TEXT: Final = re.compile(rb"(?>(?:%b|%b)*)" % (_PLAIN, _ESCAPED))
# What may stand before a cut: no half of a surrogate pair.
_WHOLE_CHARS: Final = re.compile(
    rb'(?>(?:%b|\\(?:["\\/bfnrt]|u(?![dD][89a-fA-F])[0-9a-fA-F]{4}'
    rb"|u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}))*)" % _PLAIN
)
_ESCAPE_BYTES: Final = 6  # the longest escape
_QUOTE, _LIST = b'"['
_LONGEST_NAME_BYTES: Final = 6 * 256  # each character may be an escape


class BodyScan:
    """One body on its way through the scan. Feed it, and call `step` until there is nothing to do.

    `fields` has where the value of each top-level field stands, `[start, end)`; of a name that comes
    twice, the last. A very long name is missing.
    """

    __slots__ = (
        "_complete", "_copied", "_decoder", "_in_text", "_named", "_position", "_skim", "_stack",
        "_value_at", "body", "fields", "tally",
    )  # fmt: skip

    def __init__(self) -> None:
        self.body = bytearray()
        self.fields: dict[str, tuple[int, int]] = {}
        self.tally = Tally()
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._skim = bytearray()
        self._copied = 0  # up to here the body is in the skim, or was left out of it
        self._position = 0
        self._in_text: int | None = None  # where the long string began that is being read
        self._complete = False
        self._stack = bytearray()  # the brackets that are open
        self._named = False  # a name of the top level was read, and its value comes next
        self._value_at = 0  # where the object or list at the top level began that is being read

    def feed(self, part: bytes | bytearray) -> None:
        """Take more of the body; nothing but its encoding is looked at yet.

        Raises:
            RequestError: 400; not UTF-8.
        """
        try:
            self._decoder.decode(part)
        except UnicodeDecodeError:
            raise not_utf8() from None
        self.body += part

    def end(self) -> None:
        """Note that the body is whole.

        Raises:
            RequestError: 400; it ends within a character.
        """
        self._complete = True
        try:
            self._decoder.decode(b"", final=True)
        except UnicodeDecodeError:
            raise not_utf8() from None

    def step(self) -> bool:
        """Scan a little; False when there is nothing to do until more comes.

        Raises:
            RequestError: 400; over a limit, or no JSON.
        """
        tokens, until = 0, self._position + _STEP_BYTES
        while tokens < _STEP_TOKENS and self._position < until:
            tokens += 1
            goes_on = self._token() if self._in_text is None else self._text()
            if not goes_on:
                return False
        if self._in_text is None:
            self._skim += self.body[self._copied : self._position]
            self._copied = self._position
        return True

    def skim(self) -> bytes:
        """Return the skim of a whole body whose scan is done."""
        self._skim += self.body[self._copied :]
        self._copied = len(self.body)
        return bytes(self._skim)

    def size(self, field: str) -> int:
        """Return the bytes of a field's value in the body; 0 when there is none."""
        start, end = self.fields.get(field, (0, 0))
        return end - start

    def text(self, field: str) -> str | None:
        """Return a field's value if that is a short string; None when it is not, or not yet known."""
        start, end = self.fields.get(field, (0, 0))
        return _name_of(bytes(self.body[start:end])) if start else None

    # --- inside -------------------------------------------------------------------------------------

    def _token(self) -> bool:
        """Take one token and what stands before it; False when more must come first."""
        body, position = self.body, self._position
        found = _TOKEN.match(body, position, position + _WINDOW)
        assert found is not None
        end, kind = found.end(), found.lastindex
        if end == len(body) and not self._complete:
            return False
        if kind is None:
            return self._nothing(position, end)
        start = found.start(kind)
        if start - position > _KEPT_SPACE_BYTES:
            self._leave_out(position, start, b" %b " % bytes(body[position:start].strip()))
        if start > position and end == position + _WINDOW:
            self._position = start  # the window may have cut it: once more, from where it begins
            return True
        self._position = end
        if kind == _CLOSE:
            self._close(end)
            return True
        if kind == _INTEGERS:
            self._run_of_integers(start, end)
            return True
        if kind == _SCALAR:
            self._scalar(start, end)
            return True
        self.tally.add_values(1, len(self._stack))
        if kind == _OPEN:
            self._open(start)
        else:
            self._whole_text(start, end)
        return True

    def _scalar(self, start: int, end: int) -> None:
        """Take a number or a word. Integers of lists are counted by themselves: they may be token ids."""
        if end - start > MAX_SCALAR_BYTES:
            raise _malformed(f"a number of more than {MAX_SCALAR_BYTES} digits at byte {start}")
        digits = self.body[start:end].lstrip(b"-")
        if digits.isdigit() and self._stack.endswith(b"["):
            self.tally.add_integers(1, self._stack)
        else:
            self.tally.add_values(1, len(self._stack))
            self._value(start, end)

    def _nothing(self, position: int, end: int) -> bool:
        """Take white space with no token behind it: the end, a long string, or nonsense."""
        body = self.body
        if not self._complete and body[end : end + 1] == b'"' and len(body) - end < _WINDOW:
            return False  # it may be a short string
        if end - position > _KEPT_SPACE_BYTES:
            self._leave_out(position, end, b" %b " % bytes(body[position:end].strip()))
        self._position = end
        if end == len(body):
            return False
        self.tally.add_values(1, len(self._stack))
        if body[end] == _QUOTE:
            self._in_text = end
            self._position = end + 1
        return True

    def _text(self) -> bool:
        """Read on in a long string; False when more must come first."""
        body, position = self.body, self._position
        found = _INSIDE_TEXT.match(body, position, position + _WINDOW)
        assert found is not None
        end = self._position = found.end()
        if end < len(body) and body[end] == _QUOTE:
            start, self._in_text = self._in_text or 0, None
            self._position = end + 1
            self._whole_text(start, end + 1)
            return True
        if end > position:
            return True
        if self._complete or len(body) - end >= _ESCAPE_BYTES:
            raise _malformed(f"a string is broken at byte {end}")
        return False

    def _whole_text(self, start: int, end: int) -> None:
        """Take a string; of a long one the skim gets the beginning."""
        body = self.body
        is_late = len(self._skim) >= LATE_SKIM_BYTES
        kept = LATE_TEXT_BYTES if is_late else KEPT_TEXT_BYTES
        if end - start <= kept + _ESCAPE_BYTES:
            pass
        elif self.tally.stays_whole:
            self.tally.add_whole(end - start)
        else:
            found = _WHOLE_CHARS.match(body, start + 1, start + 1 + kept)
            assert found is not None
            cut = found.end()
            while body[cut] & 0xC0 == 0x80:  # within a character
                cut -= 1
            self._leave_out(cut, end - 1, b"\\u0000")
        if self._named or self._stack != b"{":
            self._value(start, end)
        else:  # names and values take turns
            self.tally.field = _name_of(bytes(body[start:end]))
            self._named = True

    def _run_of_integers(self, start: int, end: int) -> None:
        """Take integers of a list, each with its comma; of many token ids the skim gets the first."""
        body = self.body
        self.tally.add_integers(body.count(b",", start, end), self._stack)
        if self.tally.may_hold_ids and end - start > _KEPT_INTEGERS_BYTES:
            self._leave_out(body.find(b",", start, end) + 1, end, b"")

    def _open(self, start: int) -> None:
        bracket = self.body[start]
        self._stack.append(bracket)
        depth = len(self._stack)
        if depth > MAX_DEPTH:
            raise too_deep(self.tally.field)
        if depth == 2:
            self._value_at = start
        if bracket == _LIST:
            self.tally.open_list(depth)

    def _close(self, end: int) -> None:
        stack = self._stack
        if not stack or self.body[end - 1] != stack[-1] + 2:  # in ASCII, "[" and "]", "{" and "}"
            raise _malformed(f"there is nothing to close at byte {end - 1}")
        stack.pop()
        if len(stack) == 1:
            self._value(self._value_at, end)

    def _value(self, start: int, end: int) -> None:
        """Note the value of a top-level field."""
        if len(self._stack) != 1:
            return
        if self.tally.field is not None:
            self.fields[self.tally.field] = (start, end)
        self.tally.field, self._named = None, False

    def _leave_out(self, start: int, end: int, instead: bytes) -> None:
        """Have the skim hold something else in place of a part of the body."""
        self._skim += self.body[self._copied : start]
        self._skim += instead
        self._copied = end


def _name_of(text: bytes) -> str | None:
    """Return a field's name; None for one that nobody looks for."""
    if len(text) > _LONGEST_NAME_BYTES:
        return None
    try:
        return msgspec.json.decode(text, type=str)
    except msgspec.DecodeError:
        return None


def _malformed(why: str) -> RequestError:
    return RequestError(f"The body is not valid JSON: {why}.", code="invalid_json")
