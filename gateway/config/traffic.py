"""Settings of traffic: weights and labels of backends, canaries, shadows, fallbacks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Self

from pydantic import BeforeValidator, Field, StringConstraints, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from gateway.config.names import MODEL_NAME, ModelName
from gateway.config.units import Duration, Section, setting
from gateway.core.traffic import Cause, Shadow, Trial


def _widened(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


_NAME_SCHEMA: Final = {"type": "string", "pattern": MODEL_NAME}
Names = Annotated[
    tuple[ModelName, ...],
    BeforeValidator(_widened),
    WithJsonSchema({"anyOf": [_NAME_SCHEMA, {"type": "array", "items": _NAME_SCHEMA}]}),
]


Weight = Annotated[float, Field(ge=0, le=1000)]
Labels = dict[
    Annotated[str, Field(min_length=1, max_length=64)], Annotated[str, Field(max_length=64)]
]


REVISION: Final = r"^[a-zA-Z0-9][a-zA-Z0-9._-]{0,62}$"
Revision = Annotated[str, StringConstraints(pattern=REVISION)]


class PreferConfig(Section):
    """Which backends are preferred: they get all requests until the others are clearly less busy."""

    labels: Labels = setting(
        {}, 'Labels of preferred backends; one must have all of them: {zone: "${ZONE}"}.'
    )
    spill_over: Duration = setting(
        "2s",
        "Other backends are used once the preferred ones are busier than them by so much time.",
    )

    def away_s(self, labels: Mapping[str, str]) -> float:
        """Return the seconds by which a backend with such labels counts as busier than it is."""
        return 0.0 if self.labels.items() <= labels.items() else self.spill_over


class CanaryConfig(Section):
    """A canary: which requests go to the backends of a new revision, and whether its verdict is carried out."""

    revision: Revision = Field(description="The `revision` of the backends that are the canary.")
    weight: Annotated[float, Field(gt=0, lt=1)] | None = setting(
        None,
        "Share of the conversations (0..1); each stays where it began. Write one of weight, keys, header.",
    )
    keys: tuple[str, ...] = setting((), "Ids of the keys whose requests go there.")
    header: bool = setting(
        False, "Requests with the header `x-gateway-revision: REVISION` go there."
    )
    automatic: bool = setting(
        False,
        "Roll back or promote automatically. Otherwise `status` and `events` only report the verdict.",
    )

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if (self.weight is not None) + bool(self.keys) + self.header != 1:
            raise PydanticCustomError(
                "one_of", "write one of weight, keys and header: it says which requests go there"
            )
        return self

    @property
    def by_chance(self) -> bool:
        """Whether the two sides get alike requests."""
        return self.weight is not None

    def trial(self) -> Trial:
        """Return which requests go to the revision."""
        return Trial(self.revision, self.weight or 0.0, frozenset(self.keys), self.header)


class ShadowConfig(Section):
    """Copies of some requests go to another pool. Their replies are dropped; under load, so are the copies."""

    to: ModelName = Field(
        description="The pool that gets the copies. Its base model answers them, those of requests for an adapter too."
    )
    share: Annotated[float, Field(gt=0, le=1)] = setting(
        0.01, "Share of the conversations that are copied (0..1]."
    )
    max_in_flight: int = setting(4, "Most copies at a time.", ge=1, le=1000)

    def shadow(self) -> Shadow:
        """Return what is copied, and where to."""
        return Shadow(self.to, self.share, self.max_in_flight)


class FallbackConfig(Section):
    """Pools that answer when this one cannot: one name, or several in order. Their own fallbacks are not used."""

    no_backend: Names = setting((), "When no backend of this pool serves.")
    overload: Names = setting((), "When this pool refuses a request because it is full (503).")
    context: Names = setting(
        (), "When prompt plus output do not fit its context window: pools with a larger one."
    )
    adapters: tuple[ModelName, ...] = setting(
        (), "LoRA adapters whose requests fall back too, to the other pool's base model."
    )

    def of(self, cause: Cause) -> tuple[str, ...]:
        """Return the pools that answer for a cause, the first that can."""
        match cause:
            case Cause.NO_BACKEND:
                return self.no_backend
            case Cause.OVERLOAD:
                return self.overload
            case Cause.CONTEXT:
                return self.context
