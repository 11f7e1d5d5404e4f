"""Settings of LoRA adapters: where they are, and on how many backends they are wanted."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from gateway.config.names import BackendName, ModelName
from gateway.config.units import OrWord, Section, setting


class AdapterConfig(Section):
    """One LoRA adapter. A plain name is short for {name: ...}."""

    name: ModelName = Field(description="The model name that clients use for this adapter.")
    path: str | None = setting(
        None, "Path on the backends. The gateway loads it from there, also after a restart."
    )
    replicas: Annotated[Annotated[int, Field(ge=1)] | None, OrWord("auto", None)] = setting(
        "auto",
        "On how many backends to keep it loaded. auto: on all if all adapters fit there, otherwise on"
        " more the more it is used. A number needs a path.",
    )
    pin: tuple[BackendName, ...] = setting(
        (), "Backends that always keep it. They count as replicas. Needs a path."
    )
