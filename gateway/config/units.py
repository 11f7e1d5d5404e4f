"""How settings are written: durations, sizes, token counts, addresses, and the words beside them.

Each kind has one parser and one JSON Schema. A bare number is refused where a unit decides what it
means, because `timeout: 30` reads as seconds to one person and milliseconds to the next.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Final, Literal, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    PlainSerializer,
    PlainValidator,
    ValidationInfo,
    WithJsonSchema,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from gateway.config.sockets import check_socket, check_socket_text
from gateway.config.urls import MOST_PORT, check_backend_url

_SECONDS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_BYTES: Final = {
    "B": 1,
    **{"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40},
    **{"kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12},
}
_TOKENS: Final = {"": 1, "k": 1 << 10, "m": 1 << 20}  # windows are powers of two: 32k is 32768

MOST_S: Final = 36_500 * 86_400.0  # a time after the year 9999 cannot be written
_MOST_BYTES: Final = 1 << 50
_MOST_TOKENS: Final = 1 << 50  # JSON's numbers hold it

SHOWN_CHARS: Final = 80  # of a value, in messages about it
_DURATION_PART: Final = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")
_DURATION: Final = re.compile(r"(?:\d+(?:\.\d+)?(?:ms|s|m|h|d))+")
_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?) ?([A-Za-z]+)")
_TOKEN_COUNT: Final = re.compile(r"(\d+)([kKmM]?)")
_HOST: Final = re.compile(r"[^\s/:*@]+")
_NOT_BRACKETED: Final = re.compile(r"[0-9a-fA-F:.]*:[0-9a-fA-F:.]*")
_BARE: Final = re.compile(r"\d+(?:\.\d+)?")


def parse_duration(value: object) -> float:
    """Return the seconds of `30s`, `500ms`, `2m`, `1h30m` or `30d`."""
    text = _text(value)
    if text is not None and _DURATION.fullmatch(text):
        seconds = sum(float(n) * _SECONDS[unit] for n, unit in _DURATION_PART.findall(text))
        if seconds > MOST_S:
            raise _bad("bad_duration", "{value} is too long; at most 36500d (100 years)", value)
        return seconds
    if _is_bare(value):
        raise _bad("needs_unit", "{value} has no unit; write {value}s or {value}ms", value)
    raise _bad("bad_duration", "{value} is not a duration such as 500ms, 30s, 2m, 1h, 30d", value)


def parse_size(value: object) -> int:
    """Return the bytes of `64MiB` (powers of 1024) or `8MB` (powers of 1000)."""
    text = _text(value)
    match = _SIZE.fullmatch(text) if text is not None else None
    if match and match[2] in _BYTES:
        size = float(match[1]) * _BYTES[match[2]]
        if size > _MOST_BYTES:
            raise _bad("bad_size", "{value} is too large; at most 1024TiB", value)
        return round(size)
    if _is_bare(value):
        raise _bad("needs_unit", "{value} has no unit; write {value}KiB, MiB or GiB", value)
    raise _bad("bad_size", "{value} is not a size such as 512B, 8KiB, 64MiB, 1GiB, 8MB", value)


def parse_tokens(value: object) -> int:
    """Return the count of `32768`, `32k` (32 x 1024) or `1M`."""
    text = _text(value)
    match = _TOKEN_COUNT.fullmatch(text) if text is not None else None
    if match:
        # By way of a float, as int() refuses thousands of digits in words of its own.
        tokens = float(match[1]) * _TOKENS[match[2].lower()]
    elif isinstance(value, int) and not isinstance(value, bool):
        tokens = value
    else:
        raise _bad("bad_tokens", "{value} is not a token count; write it like 32768 or 32k", value)
    if tokens > _MOST_TOKENS:
        raise _bad("bad_tokens", "{value} is too many tokens; at most 1073741824M", value)
    return int(tokens)


def format_duration(seconds: float) -> str:
    """Write seconds the way a person would put them in the file: `45s`, `1h30m`, `500ms`."""
    rest, parts = round(seconds * 1000), []
    for unit, ms in (("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1000), ("ms", 1)):
        count, rest = divmod(rest, ms)
        if count:
            parts.append(f"{count}{unit}")
    return "".join(parts) or "0s"


def format_size(size: int) -> str:
    """Write bytes with the largest unit that divides them: `64MiB`, `1500B`."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if size and size % _BYTES[unit] == 0:
            return f"{size // _BYTES[unit]}{unit}"
    return f"{size}B"


@dataclass(frozen=True, slots=True)
class Listen:
    """Where a listener is: a host and a port, or a UNIX socket. `str()` gives it as written."""

    host: str = ""
    port: int = 0  # 0: the system picks one
    unix: Path | None = None

    @property
    def loopback(self) -> bool:
        """Whether only this machine can reach it."""
        if self.unix is not None or self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def __str__(self) -> str:
        if self.unix is not None:
            return f"unix:{self.unix}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_listen(value: object) -> Listen:
    """Return the listener of `127.0.0.1:8080`, `[::1]:8080`, `host:8080` or `unix:/run/gw.sock`."""
    if isinstance(value, Listen):
        return value
    what = "a URL" if re.search("@|://", str(value)) else "{value}"  # it may have a password
    hint = f"{what} is not an address such as 127.0.0.1:8080, '[::1]:8080' or unix:/run/gw.sock"
    text = _text(value)
    if text is None:
        raise _bad("bad_address", hint, value)
    if text.startswith("unix:"):
        path = Path(text.removeprefix("unix:"))
        if not path.is_absolute():
            raise _bad("bad_address", "the socket path in {value} must be absolute", value)
        return Listen(unix=check_socket(path))
    host, _, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif _NOT_BRACKETED.fullmatch(host):
        brackets = "put the IPv6 address in {value} in brackets, like '[::1]:8080'"
        raise _bad("bad_address", brackets, value)
    elif not _HOST.fullmatch(host):
        raise _bad("bad_address", hint, value)
    if not (host and port.isdecimal() and port.isascii()):
        raise _bad("bad_address", hint, value)
    if int(port) > MOST_PORT:
        raise _bad("bad_address", "the port in {value} is above 65535", value)
    return Listen(host=host, port=int(port))


@dataclass(frozen=True, slots=True)
class OrWord:
    """Accept one word beside the values of the type, and hand on what it stands for."""

    word: str
    meaning: object

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        def validate(value: Any, inner: core_schema.ValidatorFunctionWrapHandler) -> Any:
            if isinstance(value, str) and value == self.word:
                return self.meaning
            if value is None:
                raise PydanticCustomError(
                    "empty", "the value is missing; write {word} or a value", {"word": self.word}
                )
            return inner(value)

        # `| None` and `| Literal[...]` are what the word means; the file holds X or the word.
        (written,) = (
            part
            for part in get_args(source)
            if part is not NoneType and get_origin(part) is not Literal
        )
        return core_schema.no_info_wrap_validator_function(
            validate,
            handler.generate_schema(written),
            serialization=core_schema.plain_serializer_function_ser_schema(lambda value: value),
        )

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return {"anyOf": [{"const": self.word}, handler(schema)]}


@dataclass(frozen=True, slots=True)
class OrText:
    """Accept a plain text in place of a mapping: it is the value of one key of that mapping."""

    key: str

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        def widen(value: Any) -> Any:
            return {self.key: value} if isinstance(value, str) else value

        return core_schema.no_info_before_validator_function(widen, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        short = {"type": "string", "description": f"short for {{{self.key}: ...}}"}
        return {"anyOf": [short, handler(schema)]}


def _text(value: object) -> str | None:
    return value.strip() if isinstance(value, str) else None


def _is_bare(value: object) -> bool:
    return _BARE.fullmatch(as_written(value)) is not None


def as_written(value: object) -> str:
    """Return a value as a file has it: `true`, where Python says True."""
    return str(value).lower() if isinstance(value, bool) else str(value).strip()


def _bad(kind: Any, template: Any, value: object) -> PydanticCustomError:
    text = "an empty value" if value is None else as_written(value)[:SHOWN_CHARS] or "empty text"
    return PydanticCustomError(kind, template, {"value": text})


def _empty_is_none(value: object) -> object:
    # `${VAR:-}` is how a file says "if it is set".
    return None if isinstance(value, str) and not value.strip() else value


def _beside_the_file(path: Path, info: ValidationInfo) -> Path:
    # `load` names the folder of the settings file; elsewhere paths stay as they are.
    folder = (info.context or {}).get("folder")
    return folder / path if isinstance(folder, Path) else path


def _without_nul(path: Path) -> Path:
    if "\0" in str(path):
        raise PydanticCustomError("bad_value", "no path can hold a NUL character")
    return path


def _positive(value: float) -> float:
    if value <= 0:
        raise PydanticCustomError("too_small", "must be more than 0")
    return value


def _schema(pattern: str, *examples: str) -> WithJsonSchema:
    return WithJsonSchema(
        {"type": "string", "pattern": f"^(?:{pattern})$", "examples": list(examples)}
    )


_DURATION_SCHEMA: Final = _schema(_DURATION.pattern, "500ms", "30s", "2m")

Duration = Annotated[
    float, BeforeValidator(parse_duration), AfterValidator(_positive), _DURATION_SCHEMA
]
DurationOrZero = Annotated[float, BeforeValidator(parse_duration), _DURATION_SCHEMA]
Size = Annotated[
    int,
    BeforeValidator(parse_size),
    Field(gt=0),
    _schema(rf"\d+(?:\.\d+)? ?(?:{'|'.join(_BYTES)})", "8KiB", "64MiB"),
]
Tokens = Annotated[
    int,
    BeforeValidator(parse_tokens),
    Field(gt=0),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "integer", "minimum": 1},
                {"type": "string", "pattern": f"^(?:{_TOKEN_COUNT.pattern})$", "examples": ["32k"]},
            ]
        }
    ),
]
Address = Annotated[
    Listen,
    PlainValidator(parse_listen),
    PlainSerializer(str, return_type=str),
    WithJsonSchema(
        {
            "type": "string",
            "pattern": r"^(?:unix:/.+|.+:\d+)$",
            "examples": ["127.0.0.1:8080", "unix:/run/gw.sock"],
        }
    ),
]
BackendUrl = Annotated[
    str,
    AfterValidator(check_backend_url),
    WithJsonSchema(
        {
            "type": "string",
            "pattern": "^(?:https?://[^/?#@]+/?|unix:/.+)$",
            "examples": ["http://10.0.0.11:8000", "unix:/run/vllm/b1.sock"],
        }
    ),
]
FilePath = Annotated[Path, AfterValidator(_without_nul), AfterValidator(_beside_the_file)]
SocketPath = Annotated[
    Path,
    BeforeValidator(check_socket_text),
    AfterValidator(_beside_the_file),
    AfterValidator(check_socket),
]
EmptyIsNone: Final = BeforeValidator(_empty_is_none)


class Section(BaseModel):
    """A mapping in the file: frozen, no unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)


class Hides(Enum):
    """Which parts of a setting are secret, where not all of it is."""

    VALUES = "values"  # of a mapping: environment variables
    ARGUMENTS = "arguments"  # of flags that take a secret


def setting(default: object, help_text: str, **more: Any) -> Any:
    """Declare a setting; the default is spelled as in the file and validated like one."""
    return Field(default=default, description=help_text, validate_default=True, **more)
