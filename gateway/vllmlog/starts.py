"""Which lines of a log belong to one start of vLLM, and how far that start came.

Logs are appended to: one file holds several starts, and only the last is of interest.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice, pairwise
from typing import Final

from gateway.vllmlog.errors import Raised, passes_on, raised_in
from gateway.vllmlog.lines import Line
from gateway.vllmlog.milestones import LOADED, Stage, stage_told
from gateway.vllmlog.places import when_of
from gateway.vllmlog.verdict import When

# The first words of a start: up to 0.14 or so a sentence, then a drawing, always the arguments.
_BANNER: Final = re.compile(r"vLLM API server version |[█▄▀]\s+version \d")
_ARGUMENTS: Final = re.compile(r"non-default args: |args: Namespace\(")
_USAGE: Final = re.compile(r"^usage: ")
# Frames of code that only runs before the banner; a server that stops does not come by them.
_EARLY: Final = re.compile(
    r"in (?:make_arg_parser|parse_args|validate_parsed_serve_args|create_engine_config)$"
    r"|vllm/(?!\S{0,80}api_server\.py)\S{1,200}\.py\", line \d+, in <module>$"
)
_ANEW: Final = re.compile(r"^Automatically detected platform |^Started server process \[\d+\]")

_READY: Final = re.compile(
    r"Application (?:startup|shutdown) complete"
    r"|Avg prompt throughput: |\[shutdown\] API server: |^(?:Received|Finished|Added) request "
    r"|\"(?:GET|POST) /\S{0,200} HTTP/[\d.]+\" [234]\d\d\b"
    r"|^Uvicorn running on "
)
_BAR: Final = re.compile(r"it/s\]|s/it\]")  # a progress bar is drawn once more when all is over
_UNDER_WAY: Final = range(Stage.CONFIG, Stage.WARM_UP)  # what only a start says
# Someone asked it to stop. uvicorn's own words come after an engine's death too: see `Start.stopped`.
_ASKED_TO_STOP: Final = re.compile(
    r"\[shutdown\] API server: |\[shutdown\] EngineCore: trigger received signal"
    r"|^Shutting down FastAPI HTTP server"
    r"|^Engine is gracefully shutting down"
    r"|MQLLMEngine terminated|^Received signal \d+"
    r"|port \d+ is used by process "
)
_STOPPED: Final = re.compile(
    r"^(?:Shutting down|Application shutdown complete\.?|Finished server process .*)$"
)

_DEAD_ITSELF: Final = re.compile(
    r"EngineCore encountered a fatal error|engine core exited unexpectedly|Background loop has errored"
    r"|^(?:Worker proc|Engine core proc(?:ess)?|Process) \S+ (?:\(PID: \d+\) )?died |!+ ?Segfault"
    r"|Engine loop has died|MQEngineDeadError|AsyncEngineDeadError"
)
DEAD: Final = re.compile(
    r"EngineCore encountered a fatal error|EngineDeadError|AsyncLLM output_handler failed"
    r"|AsyncEngineDeadError|MQEngineDeadError|engine core exited unexpectedly"
    r"|^(?:Worker proc|Engine core proc(?:ess)?|Process) \S+ (?:\(PID: \d+\) )?died "
    r"|Background loop (?:has errored|is stopped)|Engine loop has died|Engine is (?:already )?dead"
    r"|!+ ?Segfault encountered"
)
NOT_STARTED: Final = re.compile(
    r"Engine core initialization failed|EngineCore failed to start|WorkerProc failed to start"
    r"|WorkerProc initialization failed|Engine process failed to start"
    r"|Application startup failed|Frontend process failed during engine core"
    r"|Timed out waiting for engine"
)
_HIT: Final = re.compile(r"EngineCore_?\S* hit an exception")  # older: while it started or served

# That it computes: a throughput above zero, or a request that was answered.
_SIGNS: Final = 2
WORKS: Final = re.compile(r"generation throughput: (?!0\.0 )|\"POST \S{1,200} HTTP/[\d.]+\" 2\d\d")

# The first frame of an exception that ended the server itself, not a process or thread of it.
_MAIN: Final = re.compile(r'^File "(?!<string>).*in (?:<module>|_run_module_as_main)$')
_INTERRUPTED: Final = re.compile(r"Interrupt|Cancelled|SystemExit")

# What is not said before a start: an excerpt that begins with it is of an earlier one.
_SUBSTANCE: Final = re.compile(f"{_READY.pattern}|{DEAD.pattern}|{NOT_STARTED.pattern}")


@dataclass(frozen=True)
class Start:
    """The lines of one start, and its turning points as places in them (None: did not happen)."""

    lines: Sequence[Line]
    arguments: str = field(default="", repr=False)  # the line that lists them
    server_pid: str = ""  # of the process that listed them

    def first(self, pattern: re.Pattern[str], after: int = 0) -> int | None:
        """Return the place of the first line that a pattern finds; frames are not looked at."""
        for place in range(after, len(self.lines)):
            line = self.lines[place]
            if pattern.search(line.text) and not line.is_frame:
                return place
        return None

    @cached_property
    def raised(self) -> Mapping[int, Raised]:
        """The exceptions in it, by their places."""
        return raised_in(self.lines)

    @cached_property
    def served(self) -> int | None:
        """Where it began to serve. A script that drives the engine itself serves once it is up."""
        ready = self.first(_READY)
        while ready is not None and self._by_another(self.lines[ready]):
            ready = self.first(_READY, ready + 1)
        if ready is None and not self.has_server:
            ready = self.engine_up
        return ready

    def idle_after(self, place: int) -> bool:
        """Whether it did not work on after an error; the throughput is told one interval late."""
        signs = (at for at in range(place, len(self.lines)) if WORKS.search(self.lines[at].text))
        return len(list(islice(signs, _SIGNS))) < _SIGNS

    def when(self, end: int) -> When | None:
        """Tell by the frames before `end` what it was doing; None where they do not tell."""
        return when_of([each.text.strip() for each in self.lines[:end] if each.is_frame])

    def _by_another(self, line: Line) -> bool:
        """Whether another server wrote it, that logs into the same file."""
        return bool(self.server_pid and line.pid and line.process.startswith("APIServer")) and (
            line.pid != self.server_pid
        )

    @cached_property
    def milestones(self) -> Mapping[int, Stage]:
        """How far it came, as its lines tell, by their places."""
        told = ((at, stage_told(line)) for at, line in enumerate(self.lines))
        return {at: stage for at, stage in told if stage is not None}

    def _at(self, stage: Stage, said: re.Pattern[str] | None = None) -> int | None:
        """Return the first place that tells of a stage, in words that a pattern finds."""
        places = (at for at, each in self.milestones.items() if each is stage)
        return next((at for at in places if said is None or said.search(self.lines[at].text)), None)

    @cached_property
    def came_up(self) -> int | None:
        """Where its own HTTP server said that it is up; requests may be of another server."""
        return self._at(Stage.SERVING)

    @cached_property
    def engine_up(self) -> int | None:
        """Where the engine was initialised."""
        up = (at for at, each in self.milestones.items() if each is Stage.WARM_UP)
        return next((at for at in up if not _ANEW.search(self.lines[at].text)), None)

    @cached_property
    def loaded(self) -> int | None:
        """Where the weights were in memory."""
        return self._at(Stage.LOADING_WEIGHTS, LOADED)

    @cached_property
    def progress(self) -> int:
        """The place of the last milestone of starting up; -1 if there is none."""
        under_way = (
            at
            for at, each in self.milestones.items()
            if each in _UNDER_WAY and not _BAR.search(self.lines[at].text)
        )
        return max(under_way, default=-1)

    @cached_property
    def died(self) -> int | None:
        """Where the engine's death was first told."""
        return self.died_after(0)

    def died_after(self, place: int) -> int | None:
        """Return where the engine's death is first told from a place on."""
        told = (self.first(DEAD, place), self._hit(When.SERVING, place))
        return min((at for at in told if at is not None), default=None)

    @cached_property
    def failed(self) -> int | None:
        """Where it was first told that it cannot start."""
        told = (self.first(NOT_STARTED), self._hit(When.STARTUP))
        return min((at for at in told if at is not None), default=None)

    def _hit(self, when: When, place: int = 0) -> int | None:
        at = self.first(_HIT, place)
        if at is None:
            return None
        error = next((each for place, each in self.raised.items() if place >= at), None)
        stepped = error is not None and when_of(list(error.frames)) is When.SERVING
        return at if stepped == (when is When.SERVING) else None

    @cached_property
    def stopped(self) -> int | None:
        """Where it was asked to stop, if that was not because it had died already.

        The API server tells of a dead engine also when it has just stopped that engine itself.
        """
        asked = self.first(_ASKED_TO_STOP)
        if asked is None and self.died is None and self.failed is None:
            asked = self.first(_STOPPED)
        death = self.first(_DEAD_ITSELF)
        if asked is None or (death is not None and death < asked) or self._stops_itself(asked):
            return None
        return asked if self.died is None else min(asked, self.died)

    def _stops_itself(self, asked: int) -> bool:
        """Whether the server never served, and ended by an exception: it stops its own engine then."""
        return self.served is None and any(
            at > asked
            and error.uncaught
            and _MAIN.search(error.frames[0])
            and not _INTERRUPTED.search(error.name)
            and not passes_on(self.lines[at])
            for at, error in self.raised.items()
        )

    @cached_property
    def has_server(self) -> bool:
        """Whether an API server wrote here, not a script that drives the engine itself."""
        return any(
            line.process.startswith(("APIServer", "ApiServer")) or _BANNER.search(line.text)
            for line in self.lines
        )


def split(lines: Sequence[Line]) -> list[Start]:
    """Return the starts in a log, in order; text before the first counts to it."""
    begins: list[int] = []
    told: set[str] = set()  # what the start that is read has said: banner, arguments, ended
    for place, line in enumerate(lines):
        mark = _mark(line)
        if mark == "ended":
            told.add(mark)
        elif mark == "anew":
            if "ended" in told and not line.process.startswith(("Engine", "Worker", "Vllm")):
                begins.append(place)
                told = {mark}
        elif mark:
            repeated = mark in told or "ended" in told or mark in ("usage", "banner")
            if not told or (repeated and told != {"anew"}):
                begins.append(place)
                told = set()
            told.add(mark)
    if begins and not any(_SUBSTANCE.search(line.text) for line in lines[: begins[0]]):
        begins[0] = 0  # no more than words before the first banner
    edges = sorted({0, *begins, len(lines)})
    if len(edges) == 1:
        return [Start(())]
    return [_start(lines[a:b]) for a, b in pairwise(edges)]


def _mark(line: Line) -> str:
    """Name what a line says about where starts begin and end; empty for most."""
    text = line.text
    if line.process.startswith("ApiServer"):  # one of several servers of the same start
        return ""
    if _BANNER.search(text):
        return "banner"
    if _ARGUMENTS.search(text):
        return "arguments"
    if _USAGE.search(text):
        return "usage"
    if _ANEW.search(text) or (line.is_frame and _EARLY.search(text)):
        return "anew"
    if _STOPPED.search(text) or text.startswith("RuntimeError: Engine core initialization failed"):
        return "ended"
    return ""


def _start(lines: Sequence[Line]) -> Start:
    told = next((line for line in lines if _ARGUMENTS.search(line.text)), None)
    return Start(lines) if told is None else Start(lines, told.raw, told.pid)
