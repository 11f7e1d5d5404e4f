"""How pools, models and backends may be called in the settings."""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import StringConstraints

MODEL_NAME: Final = r"^[a-zA-Z0-9][a-zA-Z0-9._:/-]{0,127}$"
HEADER_NAME: Final = r"^[A-Za-z0-9_-]{1,64}$"
BACKEND_NAME: Final = r"^[a-z0-9][a-z0-9-]{0,62}$"

ModelName = Annotated[str, StringConstraints(pattern=MODEL_NAME)]
BackendName = Annotated[str, StringConstraints(pattern=BACKEND_NAME)]
HeaderName = Annotated[str, StringConstraints(pattern=HEADER_NAME, to_lower=True)]
