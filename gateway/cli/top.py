"""`vllm-gateway top`: backends, tenants and streams on one screen, with keys to drain, hold and explain."""

from __future__ import annotations

import contextlib
import io
import os
import select
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Final
from urllib.parse import quote

import typer

from gateway.cli.console import VerbError, ask
from gateway.cli.explaining import print_request
from gateway.cli.terminal import Terminal
from gateway.cli.topview import Focus, Lists, Verb, View, frame, keys_in, lists, pressed
from gateway.cli.verbs import LOCAL, Server, Token

_EVERY_S: Final = 2.0
_REQUESTS: Final = 500
_HIDE, _SHOW = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"  # the other screen, without a cursor
_HOME: Final = "\x1b[H"
_REST_OF_LINE, _REST = "\x1b[K", "\x1b[J"
_MOST_KEY_BYTES: Final = 1024


def top(
    server: Server = LOCAL,
    token: Token = "",
    once: Annotated[bool, typer.Option("--once", help="Print one screen and end.")] = False,
) -> None:
    """Watch backends, tenants and the longest streams; drain, hold and explain with single keys.

    Orders are shown with what they would touch, and done after `y`. Without a terminal it prints one screen.
    """
    screen = Screen(server, token)
    screen.look()
    if once or not (sys.stdin.isatty() and sys.stdout.isatty()):
        print(*frame(screen.overview, screen.lists, screen.view, Terminal.of_stdout()), sep="\n")
        return
    with _raw():
        while True:
            _draw(screen)
            if not screen.typed(_typed(_EVERY_S)):
                return
            screen.look()


@dataclass(slots=True)
class Screen:
    """What was asked of a gateway last, and what is looked at of it."""

    server: str
    token: str
    overview: dict[str, Any] = field(default_factory=dict)
    lists: Lists = field(default_factory=lambda: lists({}, []))
    view: View = field(default_factory=View)
    question: tuple[str, dict[str, object]] | None = None  # an order that waits for `y`

    def look(self) -> None:
        """Ask for everything anew; a gateway that does not answer is said so, and what was known stays.

        Raises:
            VerbError: it has never answered.
        """
        try:
            overview = ask(self.server, "/admin/v1/overview", self.token)
            told = ask(self.server, f"/admin/v1/requests?limit={_REQUESTS}", self.token)
        except VerbError as error:
            if not self.overview:
                raise
            self.view = replace(self.view, below=(str(error),))
            return
        self.overview, self.lists = overview, lists(overview, told.get("data", []))

    def typed(self, text: str) -> bool:
        """Do what keys that came together ask for; False: end. None of them answers a question of one before."""
        for key in keys_in(text):
            if not self.press(key):
                return False
            if self.question is not None:
                break
        return True

    def press(self, key: str) -> bool:
        """Do what a key asks for; False: end."""
        done = pressed(self.view, key, self.lists)
        question, self.question = self.question, None
        if isinstance(done, View):
            self.view = done
            return True
        if done is Verb.QUIT:
            return False
        try:
            below = self._carry_out(done, question)
        except VerbError as error:
            below = (str(error),)
        self.view = replace(self.view, below=below)
        return True

    def _carry_out(
        self, verb: Verb, question: tuple[str, dict[str, object]] | None
    ) -> tuple[str, ...]:
        if verb is Verb.CONFIRM:
            if question is None:
                return ()
            path, order = question
            return (_sentence(ask(self.server, path, self.token, order=order)),)
        selected = self.lists.selected(self.view)
        if verb is Verb.EXPLAIN:
            if self.view.focus is not Focus.STREAMS or selected is None:
                return ("Select a stream first (tab): `e` explains it.",)
            return self._explained(selected)
        if self.view.focus is not Focus.BACKENDS or selected is None:
            return ("Select a backend first (tab).",)
        if verb is Verb.HOLD:
            return self._ask_hold(selected.rpartition("/")[0])
        path, order = f"/admin/v1/backends/{quote(selected)}:{verb.value}", {"reason": "top"}
        would = ask(self.server, path, self.token, order={**order, "dry_run": True})
        self.question = (path, {**order})
        return (_sentence(would), "y does it, any other key does not.")

    def _ask_hold(self, pool: str) -> tuple[str, ...]:
        holds = [each.get("pool") for each in self.overview.get("holds", [])]
        held = pool in holds or None in holds
        verb, scope = "lift" if held else "hold", None if held and pool not in holds else pool
        self.question = (f"/admin/v1/restarts:{verb}", {"pool": scope, "reason": "top"})
        what, of = (
            "End the hold of" if held else "Hold",
            "all pools" if scope is None else f"pool {pool}",
        )
        return (f"{what} automatic restarts of {of}? y does it, any other key does not.",)

    def _explained(self, request_id: str) -> tuple[str, ...]:
        told = ask(self.server, f"/admin/v1/requests/{quote(request_id, safe='')}", self.token)
        text = io.StringIO()
        with contextlib.redirect_stdout(text):
            print_request(told)
        return tuple(text.getvalue().splitlines())


def _sentence(told: dict[str, Any]) -> str:
    return str(told.get("sentence") or "Done.")


def _draw(screen: Screen) -> None:
    terminal = Terminal.of_stdout()
    lines = frame(screen.overview, screen.lists, screen.view, terminal, terminal.height)
    sys.stdout.write(_HOME + f"{_REST_OF_LINE}\r\n".join(lines) + _REST_OF_LINE + _REST)
    sys.stdout.flush()


@contextlib.contextmanager
def _raw() -> Iterator[None]:
    """Have keys come one by one, on a screen of its own; both are put back."""
    import termios
    import tty

    before = termios.tcgetattr(sys.stdin)
    sys.stdout.write(_HIDE)
    try:
        tty.setcbreak(sys.stdin)
        yield
    except KeyboardInterrupt:
        return
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
        sys.stdout.write(_SHOW)
        sys.stdout.flush()


def _typed(patience_s: float) -> str:
    """Return the keys that are pressed, as soon as one is; empty: none within so many seconds."""
    ready, _, _ = select.select([sys.stdin], [], [], patience_s)
    return os.read(sys.stdin.fileno(), _MOST_KEY_BYTES).decode(errors="replace") if ready else ""
