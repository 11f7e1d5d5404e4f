"""One endpoint of the admin API as a row of the table, and what its handler gets and gives.

The row is all that is known of an endpoint: the router serves by it, and the OpenAPI document is made
from it. Handlers are plain functions of the desk, which has the live objects, and of what was asked.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from http import HTTPStatus
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Generic, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from typing_extensions import TypedDict

from gateway.admin.numbers import Between
from gateway.core.bounds import MOST_ROWS
from gateway.core.roles import Role

if TYPE_CHECKING:
    from gateway.admin.desk import Desk

REASON_CHARS: Final = 2000
ORDER_BYTES: Final = 16 * 1024  # of a body, unless the row says otherwise
_PARAMETER: Final = re.compile(r"\{(\w+)\}")


class Method(Enum):
    """How an endpoint is asked. All but GET change something, or take a body."""

    GET = "GET"
    POST = "POST"
    PATCH = "PATCH"


def _integral(value: object) -> object:
    return int(value) if isinstance(value, float) and value.is_integer() else value


Whole = Annotated[int, BeforeValidator(_integral)]  # of JSON, where 5.0 is a whole number, too


class Query(BaseModel):
    """The query parameters of an endpoint. One that it does not know is an error; empty ones are ignored."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    flags: ClassVar[frozenset[str]] = frozenset()  # mean something without a value


class ProbeQuery(Query):
    """The query parameters of what programs ask that add some of their own; unknown ones are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class DryRunQuery(Query):
    """Of a change that can be tried first."""

    dry_run: bool = Field(default=False, description="Say what would happen; change nothing.")


class ListQuery(Query):
    """Which part of a list."""

    limit: Annotated[int, Between(0, MOST_ROWS)] | None = Field(
        default=None, description="Most rows of the answer."
    )
    after: str | None = Field(
        default=None, max_length=500, description="`last_id` of the page before this one."
    )


class Body(BaseModel):
    """The JSON body of a change."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, hide_input_in_errors=True)

    reason: str = Field(default="", max_length=REASON_CHARS, description="Kept in the audit log.")


class DryRunBody(Body):
    """Of a change that can be tried first."""

    dry_run: bool = Field(default=False, description="Say what would happen; change nothing.")


class Problem(Exception):
    """An answer that is no success, for people; `code` is the machine's word for it."""

    def __init__(
        self,
        status: HTTPStatus,
        code: str,
        detail: str,
        *,
        headers: Mapping[str, str] | None = None,
        errors: Sequence[Mapping[str, str]] = (),
    ) -> None:
        super().__init__(detail)
        self.status, self.code, self.detail = status, code, detail
        self.headers, self.errors = dict(headers or {}), list(errors)


def bad_parameter(detail: str) -> Problem:
    """Return the problem of a parameter that cannot be used (400)."""
    return Problem(HTTPStatus.BAD_REQUEST, "bad_parameter", detail)


@dataclass(frozen=True, slots=True)
class Actor:
    """Who asks: the name of the token or socket, its role, and the address it comes from."""

    name: str
    role: Role
    address: str


QueryType = TypeVar("QueryType", bound=Query)
BodyType = TypeVar("BodyType", bound=Body)


@dataclass(frozen=True, slots=True)
class Asked(Generic[QueryType, BodyType]):
    """One request, read and found valid. `names` are the parts of the path that the row names."""

    actor: Actor
    names: Mapping[str, str]
    query: QueryType
    body: BodyType
    accept: str = ""
    if_match: str | None = None

    @property
    def dry_run(self) -> bool:
        """Whether nothing is to be changed, which the query or the body may say."""
        return bool(getattr(self.query, "dry_run", False) or getattr(self.body, "dry_run", False))


@dataclass(frozen=True, slots=True)
class Listing:
    """A list as it is now. `name` is what a cursor names an item by; `tell` makes a row of it.

    With `begins_after`, the items are those after that cursor already.
    """

    items: Sequence[Any]
    name: Callable[[Any], str]
    tell: Callable[[Any], Mapping[str, Any]] = lambda row: row
    begins_after: str | None = None


Row = TypeVar("Row")


class Page(TypedDict, Generic[Row]):
    """Some rows of a list. To go on, ask for those `after` the `last_id`."""

    object: Literal["list"]
    data: list[Row]
    has_more: bool
    first_id: str | None
    last_id: str | None


@dataclass(frozen=True, slots=True)
class Text:
    """An answer that is not JSON."""

    body: bytes
    content_type: str = "text/plain; charset=utf-8"
    status: HTTPStatus = HTTPStatus.OK


Handler = Callable[["Desk", Asked[Any, Any]], Awaitable[Any]]
Subject = Mapping[str, Any]  # what can be changed of a resource, as it is now


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """One row: what is asked for, who may, what it takes, what it answers, who answers.

    `role` None: anybody, without a token. `media`: of an answer that is text. `rows`: `answer` is one row
    of a list. `refusals`: the statuses besides those that any endpoint has, each with its codes. `subject`
    tells what a change may change: its digest is the ETag, and the audit log has it before and after.
    `computes`: it takes a body, and changes nothing. `alone`: it does not wait for other changes, nor they
    for it. `verb` is that of the command line.
    """

    method: Method
    path: str
    name: str
    role: Role | None
    does: str
    handler: Handler
    answer: Any = None  # of JSON; None: text
    media: tuple[str, ...] = ("text/plain",)
    rows: bool = False
    most: int | None = None  # rows of a page that has no limit; None: all
    query: type[Query] = Query
    body: type[Body] | None = None
    body_bytes: int = ORDER_BYTES
    refusals: Mapping[HTTPStatus, str] = field(default_factory=dict)
    subject: Callable[[Desk, Mapping[str, str]], Awaitable[Subject | None]] | None = None
    computes: bool = False
    alone: bool = False
    verb: str = ""

    @property
    def changes(self) -> bool:
        """Whether it may change something."""
        return self.method is not Method.GET and not self.computes

    @property
    def methods(self) -> tuple[str, ...]:
        """How it may be asked; where by GET, by HEAD, too."""
        return ("GET", "HEAD") if self.method is Method.GET else (self.method.value,)

    @property
    def parameters(self) -> list[str]:
        """The names in its path."""
        return _PARAMETER.findall(self.path)


def pattern_of(path: str) -> re.Pattern[str]:
    """Return what a request's path must match to be of this endpoint.

    The names of backends and pools have slashes. What comes last in a path has no colon, else
    `backends/{backend}` would be asked for `backends/m/b1:drain`.
    """
    parts = _PARAMETER.split(path)
    text = ""
    for place, part in enumerate(parts):
        if place % 2 == 0:
            text += re.escape(part)
            continue
        last = place == len(parts) - 2 and not parts[-1]
        one = "[^/:]+" if last and part != "pool" else "[^/]+"
        inner = f"(?:.*/)?{one}" if part == "backend" else ".+" if part == "pool" else one
        text += f"(?P<{part}>{inner})"
    return re.compile(text, re.DOTALL)
