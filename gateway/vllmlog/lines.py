"""Lines of a log without what others put before them: containers, journals, processes, loggers.

Real logs come through docker, compose, journald, kubernetes, srun or a redirect; vLLM puts the
process and its logger's head before each line, and colours both. `text` is what is left: the words
of the message, with their indentation, which tells frames of a traceback from its error. A prefix of
no known form is found by what follows it; lines that a terminal cut at its width are put together.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

MAX_CHARS: Final = 8 * 1024 * 1024  # of a log that are read: its end
MAX_LINES: Final = 60_000  # of it: what 8 MiB of a usual log hold
MATCHED_CHARS: Final = 2_000  # of one line that are looked at
_LAYERS: Final = 10  # prefixes before one message at most

# With or without the escape character: some editors and web pages drop it.
_COLOUR: Final = re.compile(r"\x1b\[[0-9;?]{0,20}[A-Za-z]|\[(?:[01];)?\d\d?m")
_CONTROL: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029]")

# One layer each; tried in turn until none fits. Every repetition is bounded.
_PREFIX: Final = re.compile(
    r"""
    [(\[](?P<process>[A-Za-z][\w.:-]{0,40})(?:\ [^()\n]{0,60})?\bpid=(?P<pid>\d{1,9})(?:,[^()\n]{0,60})?[)\]]\ ?
  | \((?P<bare>(?:APIServer|ApiServer|EngineCore|Worker|VllmWorker)\w{0,30})\)\ ?
  | (?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL|FATAL)\ (?:\d{4}-)?\d\d-\d\d\ \d\d:\d\d:\d\d
      (?:[.,]\d{1,9})?\ \[?[\w./<>-]{1,100}:\d{1,6}\]\ ?
  | (?P<short>DEBUG|INFO|WARNING|ERROR|CRITICAL):[ ]{1,10}
  | (?:-\ )?[\w.]{1,80}\ -\ (?P<std>DEBUG|INFO|WARNING|ERROR|CRITICAL)\ -\     # python's own form
  | \[(?P<boxed>DEBUG|INFO|WARNING|ERROR|CRITICAL)\]\ ?
  | (?P<plain>DEBUG|INFO|WARNING|ERROR|CRITICAL)\ [\w./-]{1,80}:\d{1,6}:[ ]
  | \[(?P<native>[IWEF])\d{3,4}\ \d\d:\d\d:\d\d[.\d]{0,12}\ [\w.-]{1,80}:\d{1,6}\]\ ?   # torch's own
  | (?P<glog>[IWEF])\d{4}\ \d\d:\d\d:\d\d\.\d{1,9}\ {1,8}\d{1,9}\ [\w.-]{1,80}:\d{1,6}\]\ ?
  | [\w.-]{1,80}:\d{1,9}:\d{1,9}\ (?:\[[^]\s]{1,20}\]\ )?NCCL\ (?P<nccl>INFO|WARN|TRACE|VERSION)\ ?
  | \[(?:rank|default)\d{1,4}\]:\ ?
  | \[pod/[^\]\s]{1,200}\]\ ?
  | [\w.-]{1,80}[ ]{1,40}\|\ ?                                        # docker compose
  | [ +]{1,16}\|\ (?=\ |Traceback|[A-Za-z_.]{1,80}:\ )                # groups of exceptions
  | \[?\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d{1,9})?(?:Z|[+-]\d\d:?\d\d)\]?\ (?:std(?:out|err)\ [FP]\ )?
  | \[?\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?\]?\ +
  | [A-Z][a-z][a-z]\ [ \d]\d\ \d\d:\d\d:\d\d(?:\.\d{1,9})?\ [\w.-]{1,80}\ [\w@./\\-]{1,80}(?:\[\d{1,9}\])?:\ ?
  | \d{1,4}:\ (?=[\[(A-Z])                                            # srun --label
    """,
    re.VERBOSE,
)

_LEVELS: Final = ("level", "short", "std", "boxed", "plain", "native", "glog", "nccl")
_SPELT: Final = {"I": "INFO", "W": "WARNING", "E": "ERROR", "F": "CRITICAL", "FATAL": "CRITICAL",
                 "WARN": "WARNING", "TRACE": "DEBUG", "VERSION": "INFO"}  # fmt: skip

# What a line of vLLM begins with, whoever writes before it.
_HEAD: Final = re.compile(
    r"\((?:APIServer|ApiServer|EngineCore|Worker|VllmWorker)\w{0,30}(?: pid=\d|\))"
    r"|(?:DEBUG|INFO|WARNING|ERROR|CRITICAL)(?: \d\d-\d\d \d\d:\d\d:\d\d[ .,]|:     \S)"
    r"|Traceback \(most recent call last\):|  File \""
)
_PREFIX_CHARS: Final = 120
_FORMS: Final = 4  # of unknown prefixes in one log, at most: stdout and stderr, two servers
_COLUMNS: Final = range(60, 251)  # widths at which terminals cut lines
PYTHON_WARNS: Final = re.compile(r"\S{1,300}\.py:\d+: \w{1,40}Warning\b")
_FRESH: Final = re.compile(
    r"\s{2}|$|[\w.]{1,80}(?:Error|Exception)\b|Traceback \(|File \"|raise |Process |frame #\d"
    rf"|{PYTHON_WARNS.pattern}"
)


_FRAMES: Final = ('  File "', "    ", "Traceback (most recent", "  [", "^^^", "~~~")
_FRAME: Final = re.compile(r'File "[^"]{1,300}", line \d{1,7}, in ')  # its indentation lost


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a log."""

    number: int  # from 1, within what was read
    raw: str  # as it stands in the log, without colours and control characters
    text: str  # without any prefix
    process: str = ""  # who wrote it, such as APIServer, EngineCore_DP0, Worker_TP1
    pid: str = ""
    level: str = ""  # ERROR, INFO ...; empty for what was printed without a logger

    @property
    def is_frame(self) -> bool:
        """Whether this is a frame of a traceback or the source line under it."""
        return self.text.startswith(_FRAMES) or _FRAME.match(self.text) is not None


def read(log: str | bytes | Iterable[str | bytes]) -> list[Line]:
    """Return the lines of the end of a log, at most `MAX_CHARS` and `MAX_LINES` of it.

    Bytes that are not UTF-8 are replaced. Nothing raises whatever the text.
    """
    if isinstance(log, str | bytes):
        whole = _text(log[-MAX_CHARS:])
    else:
        whole = "\n".join(_text(each).rstrip("\r\n") for each in log)[-MAX_CHARS:]
    return list(_lines(whole))


def _text(piece: str | bytes) -> str:
    return piece.decode("utf-8", "replace") if isinstance(piece, bytes) else piece


def _lines(whole: str) -> Iterator[Line]:
    first, last = 1, whole.rsplit("\n", MAX_LINES)
    if len(last) > MAX_LINES:
        first += last.pop(0).count("\n") + 1
    # A progress bar writes over itself with \r; what came last is what a terminal shows.
    rows = [_raw(given.rstrip("\r").rpartition("\r")[2]) for given in last]
    forms = _unknown_prefixes(rows)
    for at, raw in _rejoined(rows):
        yield _parsed(raw, first + at, forms)


def parse(given: str) -> Line:
    """Take the prefixes of known forms off one line."""
    return _parsed(_raw(given), 1, ())


def _raw(given: str) -> str:
    return _CONTROL.sub("", _COLOUR.sub("", _unwrapped(given)))


def _parsed(raw: str, number: int, forms: Sequence[re.Pattern[str]]) -> Line:
    text, process, pid, level = raw[:MATCHED_CHARS], "", "", ""
    for form in forms:
        if found := form.match(text):
            text = text[found.end() :]
            break
    for _ in range(_LAYERS):
        found = _PREFIX.match(text)
        if found is None:
            break
        process = found["process"] or found["bare"] or process
        pid = found["pid"] or pid
        said = next((found[name] for name in _LEVELS if found[name]), "")
        level = _SPELT.get(said, said) or level
        text = text[found.end() :]
    return Line(number, raw, text, process, pid, level)


def _unknown_prefixes(rows: Sequence[str]) -> list[re.Pattern[str]]:
    """Return the forms of what stands before vLLM's own head in several lines, digits aside."""
    seen: Counter[str] = Counter()
    indent = min((len(row) - len(row.lstrip(" ")) for row in rows if row.strip()), default=0)
    if indent:
        seen[" " * indent] = len(rows) + 1
    for row in rows:
        head = _HEAD.search(row, 0, _PREFIX_CHARS + 40)
        if head is not None and 0 < head.start() <= _PREFIX_CHARS:
            before = row[: head.start()]
            known = parse(before)
            rest = known.text.strip()
            # A program that forwards the log calls all of it the same, frames and errors too.
            forwards = known.level in ("DEBUG", "INFO") and head[0].startswith((" ", "Traceback"))
            if not before.strip() or forwards or rest and not _FRESH.match(rest):
                seen[re.sub(r"\d+", "0", before)] += 1
    forms = [form for form, count in seen.most_common(_FORMS) if count > 1]
    return [
        re.compile(r"\d+".join(map(re.escape, form.split("0"))))
        for form in sorted(forms, key=len, reverse=True)
    ]


def _rejoined(rows: Sequence[str]) -> Iterator[tuple[int, str]]:
    """Yield each line with its place; what a terminal or a form cut at its width is one line."""
    width = max(map(len, rows))
    cut = {
        at
        for at in range(len(rows) - 1)
        if width in _COLUMNS and _cut(rows[at], rows[at + 1], width)
    }
    joined: list[str] = []
    begin = 0
    for at, row in enumerate(rows):
        joined.append(row)
        if len(cut) > 1 and at in cut and len("".join(joined)) < MATCHED_CHARS:
            joined += [] if len(row) == width else [" "]
            continue
        yield begin, "".join(joined)
        joined, begin = [], at + 1


def _cut(row: str, following: str, width: int) -> bool:
    """Whether a row is as wide as it can be, and the next one begins with nothing of its own."""
    word = following.split(" ", 1)[0]
    if len(row) + len(word) < width or _FRESH.match(following):
        return False
    return _HEAD.search(following) is None and _PREFIX.match(following) is None


def _unwrapped(given: str) -> str:
    """Return the message of a line of docker's json-file driver; any other line as it is."""
    if not given.startswith('{"log":'):
        return given
    try:
        entry = json.loads(given)
    except (ValueError, RecursionError):  # no JSON, or nested without end
        return given
    message = entry.get("log")
    return message.rstrip("\r\n") if isinstance(message, str) else given
