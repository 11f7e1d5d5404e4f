"""Numbers in a query: plain digits within bounds, so that one number has one meaning in every language.

    minutes: Annotated[int, Between(1, 60)]

Python reads much more as a number: `1_0`, `1e400`, `nan`, the digits of other scripts.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from gateway.config.explain import OWN_WORDS

_WHOLE: Final = re.compile(r"[0-9]{1,20}")
_DECIMAL: Final = re.compile(r"[0-9]{1,20}(?:\.[0-9]{1,20})?")


@dataclass(frozen=True, slots=True)
class Between:
    """Marks an `int` or a `float` of a query: both bounds are allowed. Other workers send it as a number."""

    least: int
    most: int

    def __get_pydantic_core_schema__(
        self, kind: type[int | float], handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        """Return how the number is read, with the bounds that the API document tells."""
        bounds: dict[str, Any] = {"ge": self.least, "le": self.most}
        whole = kind is int
        inner = core_schema.int_schema(**bounds) if whole else core_schema.float_schema(**bounds)
        written, what, example = (
            (_WHOLE, "a whole number", "") if whole else (_DECIMAL, "a number", ", such as 12.5")
        )
        unfit = f"must be {what} from {self.least} to {self.most}, written in digits{example}"

        def read(value: object) -> object:
            if not isinstance(value, str):
                return value
            if written.fullmatch(value) and self.least <= (number := kind(value)) <= self.most:
                return number
            raise PydanticCustomError(OWN_WORDS, unfit)

        return core_schema.no_info_before_validator_function(read, inner)
