"""The reply that a request will get, decided before the engine paces it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from gateway.sim.ask import Ask
from gateway.sim.sequence import CacheUse
from gateway.sim.structured import Form, arguments
from gateway.sim.text import END, TOKEN_BYTES, detokenize, reply_seed, reply_words, tokenize

_WORDS: Final = 3  # of each string in JSON
_MARK: Final = "<c>"  # a parser hides it


@dataclass(frozen=True, slots=True)
class Plan:
    """One choice: the text that each token adds, and how it ends.

    From `call_at` on it is a tool call: the first token announces the function, the others carry the
    arguments. Behind text a mark begins the call, which shows nothing.
    """

    index: int
    prompt: tuple[int, ...]
    pieces: tuple[str, ...]
    tokens: tuple[int, ...]
    finish: str
    stop_reason: str | None = None
    call_at: int | None = None  # None: it is text to its end

    @property
    def text(self) -> str:
        """What it says before it calls a tool."""
        return "".join(self.pieces[: self.call_at])

    @property
    def arguments(self) -> str | None:
        """What its tool is called with, as far as it was written; None: no call was announced."""
        called = self.call_at is not None and len(self.pieces) > self.call_at
        return "".join(self.pieces[self.call_at :]) if called else None


@dataclass(frozen=True, slots=True)
class Piece:
    """One token on its way out, or several. `token` is None in the empty ending of an aborted reply."""

    plan: Plan
    position: int
    text: str
    token: int | None
    finish: str | None
    cache: CacheUse | None = None  # None: not to be told
    earlier: tuple[int, ...] = ()  # the tokens before it whose text it has, too

    @property
    def ids(self) -> list[int]:
        """The tokens whose text it has."""
        return [*self.earlier, *(() if self.token is None else (self.token,))]

    @property
    def calls(self) -> bool:
        """Whether it is a part of a tool call."""
        return self.plan.call_at is not None and self.position >= self.plan.call_at

    @property
    def is_hidden(self) -> bool:
        """Whether it is the mark of a tool call."""
        called = self.plan.call_at
        return called is not None and self.position == called - 1 and not self.text

    @property
    def announces(self) -> bool:
        """Whether it begins a tool call."""
        return self.position == self.plan.call_at

    @property
    def stop_reason(self) -> str | None:
        """The stop string that ended the reply."""
        return self.plan.stop_reason if self.finish else None


def plan_reply(ask: Ask, reply_tokens: int) -> list[Plan]:
    """Decide all choices; index = prompt index x n + choice, as in the completions endpoint.

    A reply uses up the `max_tokens` that the request states; where it states none, or the server is so
    configured, it ends by itself after `reply_tokens`. The prompt's own control goes before both.
    """
    return [
        _plan_choice(ask, prompt, which * ask.n + choice, choice, reply_tokens)
        for which, prompt in enumerate(ask.prompts)
        for choice in range(ask.n)
    ]


def _plan_choice(
    ask: Ask, prompt: tuple[int, ...], index: int, choice: int, reply_tokens: int
) -> Plan:
    seed = reply_seed(prompt, ask.adapter, choice)
    if ask.tool is not None:
        return _cut(_plan_call(ask, prompt, index, choice), ask.max_tokens)
    if ask.form is not None:
        return _cut(_plan_form(ask, ask.form, prompt, index, choice), ask.max_tokens)
    natural = ask.control.tokens
    if natural is None and ask.ends_itself:
        natural = reply_tokens
    if natural is not None:
        natural -= min(ask.begun_tokens, natural)
    ends = natural is not None and natural <= ask.max_tokens
    length = natural if natural is not None and ends else ask.max_tokens
    finish = "stop" if ends else "length"
    if not length:  # the model ends at once, with a token that shows nothing
        return Plan(index, prompt, ("",), (END,), finish)
    pieces = reply_words(seed, length)
    tokens = tuple(tokenize("".join(pieces)))
    return _stop_early(Plan(index, prompt, pieces, tokens, finish), ask.stop)


def _plan_form(ask: Ask, form: Form, prompt: tuple[int, ...], index: int, choice: int) -> Plan:
    """Decide a reply in the form that the request demands, or the rest of one that has begun."""
    begun = ask.begun_tokens
    seed = reply_seed(prompt[: len(prompt) - begun], ask.adapter, choice)
    tokens = tuple(tokenize(form("".join(reply_words(seed, _WORDS)).strip())))[begun:] or (END,)
    return Plan(index, prompt, tuple(detokenize([token]) for token in tokens), tokens, "stop")


def _plan_call(ask: Ask, prompt: tuple[int, ...], index: int, choice: int) -> Plan:
    """Decide a reply that calls a tool, at once or behind some text."""
    said = max(0, (ask.control.call_at or 0) - ask.begun_tokens)
    before = reply_words(reply_seed(prompt, ask.adapter, choice), said)
    begun = tokenize("".join(before))
    words = "".join(reply_words(reply_seed((*prompt, *begun), ask.adapter, choice), _WORDS))
    called = tokenize(arguments(ask.body.get("tools"), ask.tool or "", words))
    mark = 0 if ask.control.call_at is None else 1
    pieces = (*before, *[""] * mark, "", *(detokenize([token]) for token in called))
    name = tokenize((ask.tool or "")[:TOKEN_BYTES] or "tool")
    tokens = (*begun, *tokenize(_MARK) * mark, *name, *called)
    finish = "stop" if ask.tool_forced else "tool_calls"
    return Plan(index, prompt, pieces, tokens, finish, call_at=said + mark)


def _cut(plan: Plan, length: int) -> Plan:
    if len(plan.pieces) <= length:
        return plan
    return replace(plan, pieces=plan.pieces[:length], tokens=plan.tokens[:length], finish="length")


def _stop_early(plan: Plan, stops: tuple[str, ...]) -> Plan:
    """End before the first stop string; its tokens are generated, its text is not shown."""
    if not any(stops):
        return plan
    text = "".join(plan.pieces)
    found = min(((text.find(s) + len(s), s) for s in stops if s and s in text), default=None)
    held_back = max(map(len, stops)) - 1
    if found is None:
        pieces = _held_back(text, len(plan.pieces), held_back)
        return replace(plan, pieces=pieces)
    end, stop = found
    count = -(-end // TOKEN_BYTES)
    pieces = _held_back(text[: end - len(stop)], count, held_back)
    return Plan(plan.index, plan.prompt, pieces, plan.tokens[:count], "stop", stop)


def _held_back(text: str, count: int, chars: int) -> tuple[str, ...]:
    """Return the text that each of `count` tokens shows, of which all but the last hold some back."""
    ends = [max(0, number * TOKEN_BYTES - chars) for number in range(count)]
    return tuple(text[start:end] for start, end in zip(ends, [*ends[1:], len(text)], strict=True))
