"""Whether another backend takes up the reasoning of a model where it was. Pure.

A parser in the engine tells reasoning from the answer, by marks that show no text of their own. Most see
from the prompt, which holds what was said so far, whether the reasoning is still open; some do not. So
the first text after the seam has to be of the same kind as the last before it, or follow a mark:

    reasoning | reasoning           goes on
    reasoning | mark, answer        goes on: a token that showed nothing came before the answer
    reasoning | answer              its parser takes the rest of the reasoning for the answer
    answer    | reasoning           it takes the rest of the answer for reasoning

A character that is not whole shows nothing either, and begins a text that is not ASCII.

Where no engine tells ids (decision 046), a thought goes on only if its mark stands at the end of the prompt
(`closing_mark`): nobody sees one that the model writes itself, nor the white space before the mark that ends it.
That one is a token: an answer behind the seam has to come with it.
"""

from __future__ import annotations

from typing import Final

from gateway.resume.shown import shown_by_chat

OPENING_TOKENS: Final = 8  # the mark is among so many, with the line ends behind it
# By what opens reasoning.
_CLOSES: Final = {"<think>": "</think>", "<seed:think>": "</seed:think>", "[THINK]": "[/THINK]"}


def closing_mark(prompt_end: str) -> str | None:
    """Return the mark that ends the reasoning which the end of a prompt begins; None: it begins none."""
    end = prompt_end.rstrip()
    return next((closes for opens, closes in _CLOSES.items() if end.endswith(opens)), None)


class Expected:
    """What the first text after a seam has to be; `kind` is empty once it came, or if anything fits."""

    __slots__ = ("_marked", "kind")

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._marked = False

    def fits(self, frame: bytes) -> bool:
        """Whether a frame with a choice fits; asked for each, up to the first that shows something."""
        shown = shown_by_chat(frame)
        if shown is not None and not shown.text:
            self._marked = True
            return True
        expected, self.kind = self.kind, ""
        if shown is not None and shown.earlier_chars:
            return expected != "content"
        if shown is not None and shown.kind == expected:
            return True
        if expected == "content":
            return shown is None  # a tool call may follow an answer
        return self._marked if shown is None else self._marked and shown.text[0].isascii()
