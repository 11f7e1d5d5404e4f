"""Chat templates: messages in, the very text that the engine will tokenise out.

As in vLLM (0.32 and 0.33, renderers/hf.py), with Jinja set up as in transformers 5. Where the engine may do
what is not modelled, `Unmodelled` is raised and the caller asks a backend instead.

A template is the operator's file, yet code: it runs in Jinja's immutable sandbox, with a limit on
what it writes and a deadline.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from typing import Any, Final

import jinja2.ext
import jinja2.meta
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gateway.counting.contents import loops_over_parts
from gateway.counting.messages import (
    Json,
    Unmodelled,
    developer_as_system,
    documents_of,
    messages_of,
    tools_of,
    with_effort,
)

MAX_RENDERED_CHARS: Final = 32 << 20
_MAX_EXPONENT: Final = 64
# Arguments of the template call itself: given by a client, they would mean something else.
_RESERVED: Final = frozenset(
    {
        *("messages", "conversation", "tools", "documents", "chat_template", "tokenize"),
        *("add_generation_prompt", "continue_final_message", "padding", "truncation", "max_length"),
        *("return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"),
    }
)


class ChatTemplate:
    """One compiled template. Safe to use from several threads."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Compile it.

        Raises:
            jinja2.TemplateError: it is no template.
        """
        environment = _Sandbox(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, jinja2.ext.loopcontrols],
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        tree = environment.parse(source)
        self._template = environment.from_string(source)
        self._variables = jinja2.meta.find_undeclared_variables(tree)
        self._parts = loops_over_parts(tree)  # the ways in which an engine may hand over contents
        self._knows_developer = '"developer"' in source or "'developer'" in source
        self._special_tokens = dict(special_tokens)

    def render(self, request: Json, *, until: float) -> str:
        """Return the prompt text of a chat request.

        Args:
            request: the decoded body of a chat completion.
            until: monotonic seconds; past it the template is stopped where it next writes.

        Raises:
            Unmodelled: the engine may render something else, or refuse.
        """
        first, *others = (self._rendered(request, parts, until) for parts in self._parts)
        if any(each != first for each in others):
            raise Unmodelled("contents are handed over in another way by each release of vLLM")
        return first

    def _rendered(self, request: Json, parts: bool, until: float) -> str:
        messages = messages_of(request, parts=parts)
        if not self._knows_developer and any(each["role"] == "developer" for each in messages):
            messages = developer_as_system(messages)
        arguments = {
            **self._special_tokens,
            **self._keywords(request),
            "messages": messages,
            "tools": tools_of(request),
            "documents": documents_of(request),
            "add_generation_prompt": request.get("add_generation_prompt", True),
        }
        written: list[str] = []
        size = 0
        try:
            for piece in self._template.generate(arguments):
                written.append(piece)
                size += len(piece)
                if size > MAX_RENDERED_CHARS or time.monotonic() > until:
                    raise Unmodelled("the template writes too much or for too long")
        except Unmodelled:
            raise
        except Exception as error:  # a template may fail in any way that code can
            raise Unmodelled(f"the template failed: {type(error).__name__}") from error
        return "".join(written)

    def _keywords(self, request: Json) -> Json:
        """Return the client's template variables that the template looks at."""
        given = request.get("chat_template_kwargs") or {}
        if not isinstance(given, dict) or not _RESERVED.isdisjoint(given):
            raise Unmodelled("chat_template_kwargs reach the engine's own arguments")
        given = with_effort(given, request.get("reasoning_effort"))
        return {
            name: value
            for name, value in given.items()
            if name in self._variables and value is not None and value != "auto"
        }


# --- Jinja as transformers sets it up -------------------------------------------------------------


class _Sandbox(ImmutableSandboxedEnvironment):
    """The sandbox, and no way to make something huge out of a short template."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and isinstance(right, int) and abs(right) > _MAX_EXPONENT:
            raise SecurityError("exponent too large")
        for repeated, times in ((left, right), (right, left)):
            repeats = isinstance(repeated, str | list | tuple) and isinstance(times, int)
            if repeats and len(repeated) * times > MAX_RENDERED_CHARS:
                raise SecurityError("repeated too often")
        return super().call_binop(context, operator, left, right)


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks what a model wrote, for training; here it only shows its content."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_show")
        return nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _show(self, caller: Callable[[], str]) -> str:
        return caller()


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> Iterator[str]:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)  # noqa: DTZ005 - the engine's template uses local time
