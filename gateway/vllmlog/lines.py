"""Lines of a log without what others put before them: containers, journals, processes, loggers.

Real logs come through docker, compose, journald, kubernetes, srun or a redirect; vLLM puts the
process and its logger's head before each line, and colours both. `text` is what is left: the words
of the message, with their indentation, which tells frames of a traceback from its error.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
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
    \((?P<process>[A-Za-z][\w.:-]{0,40})(?:\ [^()\n]{0,60})?\bpid=(?P<pid>\d{1,9})(?:,[^()\n]{0,60})?\)\ ?
  | \((?P<bare>(?:APIServer|ApiServer|EngineCore|Worker|VllmWorker)\w{0,30})\)\ ?
  | (?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL|FATAL)\ (?:\d{4}-)?\d\d-\d\d\ \d\d:\d\d:\d\d
      (?:[.,]\d{1,9})?\ \[?[\w./<>-]{1,100}:\d{1,6}\]\ ?
  | (?P<short>DEBUG|INFO|WARNING|ERROR|CRITICAL):[ ]{1,10}
  | (?:-\ )?[\w.]{1,80}\ -\ (?P<std>DEBUG|INFO|WARNING|ERROR|CRITICAL)\ -\     # python's own form
  | \[(?P<boxed>DEBUG|INFO|WARNING|ERROR|CRITICAL)\]\ ?
  | (?P<plain>DEBUG|INFO|WARNING|ERROR|CRITICAL)\ [\w./-]{1,80}:\d{1,6}:[ ]
  | \[(?:rank|default)\d{1,4}\]:\ ?
  | \[pod/[^\]\s]{1,200}\]\ ?
  | [\w.-]{1,80}[ ]{1,40}\|\ ?                                        # docker compose
  | \d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d{1,9})?(?:Z|[+-]\d\d:?\d\d)\ (?:std(?:out|err)\ [FP]\ )?
  | \[?\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?\]?\ +
  | [A-Z][a-z][a-z]\ [ \d]\d\ \d\d:\d\d:\d\d(?:\.\d{1,9})?\ [\w.-]{1,80}\ [\w@./\\-]{1,80}(?:\[\d{1,9}\])?:\ ?
  | \d{1,4}:\ (?=[\[(A-Z])                                            # srun --label
    """,
    re.VERBOSE,
)

_LEVELS: Final = ("level", "short", "std", "boxed", "plain")


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
        return self.text.startswith(('  File "', "    ", "Traceback (most recent", "  ["))


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
    for number, given in enumerate(last, first):
        # A progress bar writes over itself with \r; what came last is what a terminal shows.
        shown = given.rstrip("\r").rpartition("\r")[2]
        yield parse(shown, number)


def parse(given: str, number: int = 1) -> Line:
    """Take the prefixes off one line."""
    raw = _CONTROL.sub("", _COLOUR.sub("", _unwrapped(given)))
    text, process, pid, level = raw[:MATCHED_CHARS], "", "", ""
    for _ in range(_LAYERS):
        found = _PREFIX.match(text)
        if found is None:
            break
        process = found["process"] or found["bare"] or process
        pid = found["pid"] or pid
        level = next((found[name] for name in _LEVELS if found[name]), level)
        text = text[found.end() :]
    return Line(number, raw, text, process, pid, level)


def _unwrapped(given: str) -> str:
    """Return the message of a line of docker's json-file driver; any other line as it is."""
    if not given.startswith('{"log":'):
        return given
    try:
        entry = json.loads(given)
    except ValueError:
        return given
    message = entry.get("log")
    return message.rstrip("\r\n") if isinstance(message, str) else given
