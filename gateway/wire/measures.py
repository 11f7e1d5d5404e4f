"""What a body asks for: its fields, how much of each that the policy limits, what can never be right.

A body of ordinary fields costs one set operation beyond taking it apart. Numbers and switches are
read as laxly as vLLM's models do, so that no spelling passes here and counts there.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Set
from typing import Annotated, Final

import msgspec
from msgspec import Raw

from gateway.core.asked import Asked, Fact
from gateway.core.endpoints import GENERATES, PAIRED
from gateway.core.errors import RequestError
from gateway.core.printable import shown
from gateway.core.types import Endpoint
from gateway.wire.content import has_content, scan
from gateway.wire.fields import known_fields
from gateway.wire.found import Found
from gateway.wire.lax import is_on, number_of
from gateway.wire.objects import begins, decode_or_none, fields_once, items_of, wrong_type
from gateway.wire.parameters import UNLIMITED
from gateway.wire.schemas import (
    format_facts,
    functions_in,
    may_be_strict,
    structured_facts,
    tool_facts,
)
from gateway.wire.table import REFUSED_IN_FORMS, TABLE

_QUOTE, _LIST, _OBJECT, _NULL = b'"[{n'
_TEXT: Final = msgspec.json.Decoder(str)
_TEXTS: Final = msgspec.json.Decoder(list[str])
_PLAIN_IDS: Final = msgspec.json.Decoder(list[Annotated[int, msgspec.Meta(ge=0, lt=2**31)]])
# Source: vLLM 0.32's SamplingParams; the highest temperature is ours, far above what makes sense.
RANGES: Final[Mapping[str, tuple[float, float]]] = {
    "temperature": (0.0, 100.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "top_k": (-1.0, 2.0**31 - 1),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (0.0, 100.0),
    "length_penalty": (-100.0, 100.0),
}
_SALT: Final = re.compile(r"[^@/\\\x00]{1,128}")
# The fields that limit the output: the newest first, which wins. An endpoint ignores those of the others.
OUTPUT_LIMITS: Final[Mapping[Endpoint, tuple[str, ...]]] = {
    **dict.fromkeys([Endpoint.CHAT, Endpoint.CHAT_BATCH], ("max_completion_tokens", "max_tokens")),
    **dict.fromkeys([Endpoint.COMPLETIONS, Endpoint.MESSAGES], ("max_tokens",)),
    Endpoint.RESPONSES: ("max_output_tokens",),
}
COMPLETIONS_MAX_TOKENS: Final = 16  # where none is stated. Source: OpenAI reference; so in vLLM


class Measure:
    """One body, taken apart and measured."""

    __slots__ = ("_unknown", "documents", "endpoint", "fields", "found", "plain")

    def __init__(self, endpoint: Endpoint, fields: dict[str, Raw]) -> None:
        """Measure a body by its fields.

        Raises:
            RequestError: 400; a key comes twice, or something in it can never be right.
        """
        self.endpoint = endpoint
        self.fields = fields
        self.plain = True  # its content surely is text
        self.documents = 1  # to rank or score, each in a sequence of its own
        self.found = Found()
        self._unknown = 0
        known, looks, looked_at = _LOOKS[endpoint]
        for name in looked_at.intersection(fields):
            looks[name](self, name, fields[name])
        if not fields.keys() <= known:
            self._look_at_unknown(fields.keys() - known)

    def asked(self, *, choices: int, prompts: int = 1, prompts_field: str = "prompt") -> Asked:
        """Return what it asks for, with the sequences it makes."""
        facts = self.found
        if choices > 1:
            facts.append(Fact("n", float(choices), "n"))
            if "use_beam_search" in self.fields and is_on(self.fields["use_beam_search"]):
                facts.append(Fact("beams", float(choices), "n"))
        if prompts > 1:
            row = "prompts" if self.endpoint in GENERATES else "inputs"
            facts.append(Fact(row, float(prompts), prompts_field))
            if choices > 1:
                facts.append(Fact("sequences", float(prompts * choices), "n"))
        return Asked(tuple(facts), self._unknown)

    def _look_at_unknown(self, names: Set[str]) -> None:
        given = [
            name for name in self.fields if name in names and begins(self.fields[name]) != _NULL
        ]
        self._unknown = len(given)
        if given:
            self.note("unknown", 1.0, shown(given[0]))

    def note(self, row: str, value: float, path: str) -> None:
        """Note a fact."""
        self.found.append(Fact(row, value, path))

    # --- readers: each looks at one field that is given ---------------------------------------------

    def _content(self, name: str, raw: Raw) -> None:
        if not scan(name, raw, self.found):
            self.plain = False
        if name in _READERS:
            _READERS[name](self, name, raw)

    def _deny(self, name: str, raw: Raw) -> None:
        if name != "priority" or number_of(raw) != 0:
            self.note(name, 1.0, name)

    def _template_kwargs(self, name: str, raw: Raw) -> None:
        if begins(raw) != _OBJECT:
            raise wrong_type(name, "expected `object`")
        for key in fields_once(raw, name):
            if f"{name}.{key}" in TABLE:
                self.note(f"{name}.{key}", 1.0, f"{name}.{key}")

    def _range(self, name: str, raw: Raw) -> None:
        value = number_of(raw)
        if value is None:
            return  # of no type that vLLM takes
        least, most = RANGES[name]
        if not least <= value <= most:  # true of NaN, too
            raise RequestError(
                f"`{name}` must be between {least:g} and {most:.10g}.",
                param=name,
                code="decimal_below_min_value" if value < least else "decimal_above_max_value",
            )

    def _logprobs(self, name: str, raw: Raw) -> None:
        value = number_of(raw)
        if value is not None:
            self.note(
                "prompt_logprobs" if name == "prompt_logprobs" else "logprobs",
                UNLIMITED if value < 0 or math.isnan(value) else value,
                name,
            )

    def _strings(self, name: str, raw: Raw) -> None:
        row, chars = _STRING_ROWS[name]
        listed = Raw(b"[%b]" % bytes(raw)) if begins(raw) != _LIST else raw
        texts = decode_or_none(_TEXTS, listed) or items_of(listed)
        self.note(row, float(len(texts)), name)
        self.note(chars, float(max(map(len, texts), default=0)), name)

    def _ids(self, name: str, raw: Raw) -> None:
        if begins(raw) != _LIST:
            return
        try:
            self.note(name, float(len(_PLAIN_IDS.decode(raw))), name)
            return  # each is a valid token id
        except msgspec.ValidationError:
            items = items_of(raw)
        self.note(name, float(len(items)), name)
        for item in map(Raw, set(map(bytes, items))):
            if (value := number_of(item)) is not None and not 0 <= value < 2**31:
                raise RequestError(
                    f"`{name}` contains an invalid token id.", param=name, code="invalid_token_id"
                )

    def _bias(self, name: str, raw: Raw) -> None:
        if begins(raw) == _OBJECT:
            self.note(name, float(len(fields_once(raw, name))), name)

    def _format(self, name: str, raw: Raw) -> None:
        format_facts(raw, name, self.found)

    def _structured(self, name: str, raw: Raw) -> None:
        structured_facts(raw, name, self.found)

    def _tools(self, name: str, raw: Raw) -> None:
        if begins(raw) == _NULL:
            return
        self.found.add(Fact("tools_bytes", float(len(raw)), name))
        if begins(raw) != _LIST:
            return
        tools = items_of(raw)
        self.found.add(Fact("tools", float(functions_in(raw, len(tools))), name))
        choice = bytes(self.fields.get("tool_choice", b"null"))
        forced = choice not in (b"null", b'"auto"', b'"none"')
        if forced or (choice != b'"none"' and may_be_strict(raw)):
            for index, tool in enumerate(tools):
                tool_facts(tool, f"{name}[{index}]", self.found, forced=forced)

    def _documents(self, name: str, raw: Raw) -> None:
        if self.endpoint in PAIRED and begins(raw) == _LIST:
            count = len(items_of(raw))
            self.documents = max(self.documents, count)
            self.note("documents", float(count), name)

    def _removed(self, name: str, raw: Raw) -> None:
        raise RequestError(
            f"`{name}` was removed from vLLM, which would ignore it. Use {_NEW_NAMES[name]}.",
            param=name,
            code="unsupported_parameter",
        )

    def _min_tokens(self, name: str, raw: Raw) -> None:
        least, most = number_of(raw), self._output_limit()
        if least is not None and not 0 <= least < UNLIMITED:
            raise RequestError(f"`{name}` must be at least 0.", param=name, code="integer_below_min_value")  # fmt: skip
        if least is not None and most is not None and least > most:
            raise RequestError(
                f"`{name}` must be at most the output limit of {most:.0f}, got {least:.0f}.",
                param=name,
                code="integer_above_max_value",
            )

    def _ignore_eos(self, name: str, raw: Raw) -> None:
        if is_on(raw) and self._output_limit() is None:
            field = OUTPUT_LIMITS.get(self.endpoint, ("max_tokens",))[-1]
            raise RequestError(
                f"`{name}` needs an output limit: set `{field}` too.",
                param=name,
                code="missing_required_parameter",
            )

    def _output_limit(self) -> float | None:
        names = OUTPUT_LIMITS.get(self.endpoint, ())
        limits = [number_of(self.fields[name]) for name in names if name in self.fields]
        given = [limit for limit in limits if limit is not None]
        if not given and self.endpoint is Endpoint.COMPLETIONS:
            return COMPLETIONS_MAX_TOKENS
        return given[0] if given else None

    def _best_of(self, name: str, raw: Raw) -> None:
        choices = number_of(self.fields["n"]) if "n" in self.fields else 1.0
        if number_of(raw) not in (choices or 1.0, None):
            raise RequestError(
                f"`{name}` is not supported unless it equals `n`.",
                param=name,
                code="unsupported_parameter",
            )

    def _salt(self, name: str, raw: Raw) -> None:
        if begins(raw) != _QUOTE or not _SALT.fullmatch(_TEXT.decode(raw)):
            raise RequestError(
                f"`{name}` must be 1 to 128 characters, without @, /, \\ and NUL.",
                param=name,
                code="invalid_value",
            )

    def _stored(self, name: str, raw: Raw) -> None:
        if self.endpoint is not Endpoint.RESPONSES:
            return
        if name in ("background", "store") and not is_on(raw):
            return
        code = "unsupported_parameter"
        if name == "previous_response_id":
            code = "previous_response_not_found"
        raise RequestError(
            f"`{name}` is not supported: responses are not stored here. {_INSTEAD[name]}",
            param=name,
            code=code,
        )

    def _thread(self, name: str, raw: Raw) -> None:
        if self.endpoint is Endpoint.MESSAGES:
            raise RequestError(
                f"`{name}` is not supported: conversations are not stored here. Send the whole "
                f"conversation as `messages`, without `{name}`.",
                param=name,
                code="thread_unsupported_request",  # Anthropic's SDKs then do that by themselves
            )


_INSTEAD: Final = {
    "background": "Leave it out and read the answer, or stream it.",
    "store": "Leave it out, or send `false`.",
    "previous_response_id": "Send the whole conversation as `input`.",
    "conversation": "Send the whole conversation as `input`.",
    "prompt": "Send its text as `instructions` or `input`.",
}
_STRING_ROWS: Final = {
    "stop": ("stop", "stop_chars"),
    "stop_sequences": ("stop", "stop_chars"),
    "bad_words": ("bad_words", "bad_word_chars"),
}
_NEW_NAMES: Final = {
    "guided_json": "`response_format` or `structured_outputs.json`",
    "guided_regex": "`structured_outputs.regex`",
    "guided_choice": "`structured_outputs.choice`",
    "guided_grammar": "`structured_outputs.grammar`",
    "guided_decoding_backend": "`structured_outputs`; the backend is the server's setting",
    "guided_whitespace_pattern": "`structured_outputs`",
}
_Reader = Callable[[Measure, str, Raw], None]


def _unless_null(reader: _Reader) -> _Reader:
    def read(measure: Measure, name: str, raw: Raw) -> None:
        if begins(raw) != _NULL:
            reader(measure, name, raw)

    return read


_GIVEN_READERS: Final[dict[str, _Reader]] = {
    **dict.fromkeys(REFUSED_IN_FORMS, Measure._deny),
    **dict.fromkeys(_NEW_NAMES, Measure._removed),
    **dict.fromkeys(["logprobs", "top_logprobs", "prompt_logprobs"], Measure._logprobs),
    **dict.fromkeys(_STRING_ROWS, Measure._strings),
    **dict.fromkeys(["stop_token_ids", "allowed_token_ids", "logprob_token_ids"], Measure._ids),
    **dict.fromkeys(["response_format", "text", "output_config", "output_format"], Measure._format),
    **dict.fromkeys(_INSTEAD, Measure._stored),
    "thread": Measure._thread,
    **dict.fromkeys(TABLE["documents"].fields, Measure._documents),
    "chat_template_kwargs": Measure._template_kwargs,
    "logit_bias": Measure._bias,
    "structured_outputs": Measure._structured,
    "min_tokens": Measure._min_tokens,
    "ignore_eos": Measure._ignore_eos,
    "best_of": Measure._best_of,
    "cache_salt": Measure._salt,
}
_READERS: Final[dict[str, _Reader]] = {
    **{name: _unless_null(reader) for name, reader in _GIVEN_READERS.items()},
    # These are in most bodies, so they have no `_unless_null` around them: they see to null themselves.
    **dict.fromkeys(RANGES, Measure._range),
    "tools": Measure._tools,
}
SIZED_FIELDS: Final = frozenset(_READERS)  # whose length may matter


def _looks(endpoint: Endpoint) -> tuple[frozenset[str], dict[str, _Reader], frozenset[str]]:
    """Return an endpoint's known fields, how those are looked at that need it, and which they are."""
    known = known_fields(endpoint)
    # The readers of other endpoints' fields too: the engine may read them all the same.
    looks = _READERS | {name: Measure._content for name in known if has_content(endpoint, name)}
    return known, looks, frozenset(looks)


_LOOKS: Final = {endpoint: _looks(endpoint) for endpoint in Endpoint}
