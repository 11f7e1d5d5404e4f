"""How much a large body holds, and when that is too much."""

from __future__ import annotations

from typing import Final

import msgspec

from gateway.core.errors import RequestError
from gateway.wire.content import CONTENT_FIELDS
from gateway.wire.measures import SIZED_FIELDS

# Names, objects, lists, strings and whatever else is no token id. A conversation of 5,000 messages
# with tool calls has about 60,000, 500 tools have 30,000.
MAX_VALUES: Final = 100_000
# Four windows of a million, or 2,048 embedding inputs of 2,048 each.
MAX_INTEGERS: Final = 4 << 20
# Of long strings in fields whose size the parameter policy judges; it lets tools have 1 MiB.
MAX_WHOLE_BYTES: Final = 4 << 20

WHOLE: Final = SIZED_FIELDS - CONTENT_FIELDS - {"prompt"}  # the policy judges their sizes
MAY_HOLD_IDS: Final = frozenset({"prompt", "input", "tokens"})
_LIST: Final = ord("[")


class Ids(msgspec.Struct):
    """How many token ids one field has."""

    own: int = 0  # in the field's list itself
    inner: list[int] = []  # in each list within that list


class Tally:
    """What was counted of one body. `field` is the top-level field that is being read, None for none."""

    __slots__ = ("_integers", "_whole_bytes", "field", "ids", "values")

    def __init__(self) -> None:
        self.field: str | None = None
        self.values = 0
        self.ids: dict[str, Ids] = {}
        self._integers = 0
        self._whole_bytes = 0

    @property
    def may_hold_ids(self) -> bool:
        """Whether integers of the field are token ids."""
        return self.field in MAY_HOLD_IDS

    @property
    def stays_whole(self) -> bool:
        """Whether the policy has to see all of the field."""
        return self.field is None or self.field in WHOLE

    def add_values(self, count: int, depth: int) -> None:
        """Count values, `depth` containers deep.

        Raises:
            RequestError: 400; too many.
        """
        self.values += count
        if self.values > MAX_VALUES:
            raise _too_many(self.field if depth > 1 else None, "values", MAX_VALUES)

    def add_integers(self, count: int, stack: bytearray) -> None:
        """Count integers in a list; `stack` holds the brackets that are open.

        Raises:
            RequestError: 400; too many.
        """
        if self.field is None or not self.may_hold_ids:
            self.add_values(count, len(stack))
            return
        self._integers += count
        if self._integers > MAX_INTEGERS:
            raise _too_many(self.field, "integers", MAX_INTEGERS)
        ids = self.ids.get(self.field)
        if ids is None:
            return
        if len(stack) == 2:
            ids.own += count
        elif len(stack) == 3 and stack[2] == _LIST:
            ids.inner[-1] += count

    def open_list(self, depth: int) -> None:
        """Note a list, so many containers deep with itself."""
        if self.field is None or not self.may_hold_ids:
            return
        if depth == 2:
            self.ids[self.field] = Ids()
        elif depth == 3 and self.field in self.ids:
            self.ids[self.field].inner.append(0)

    def add_whole(self, size: int) -> None:
        """Count the bytes of a long string that stays whole.

        Raises:
            RequestError: 400; too many.
        """
        self._whole_bytes += size
        if self._whole_bytes > MAX_WHOLE_BYTES:
            raise RequestError(
                "The body holds too much text outside of messages and prompts: at most "
                f"{MAX_WHOLE_BYTES >> 20} MiB are accepted.",
                param=self.field,
                code="string_above_max_length",
            )


def _too_many(field: str | None, what: str, limit: int) -> RequestError:
    where = "The body" if field is None else f"`{field}`"
    return RequestError(
        f"{where} holds too many {what}: at most {limit:,} are accepted in one request. "
        "Split it into several requests.",
        param=field,
        code="array_above_max_length",
    )
