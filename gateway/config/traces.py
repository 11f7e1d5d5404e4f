"""The settings of traces."""

from __future__ import annotations

from typing import Annotated, Final
from urllib.parse import urlsplit

from pydantic import AfterValidator, SecretStr, StringConstraints
from pydantic_core import PydanticCustomError

from gateway.config.units import EmptyIsNone, Section, setting


def _check_endpoint(value: SecretStr | None) -> SecretStr | None:
    if value is not None and not _is_http(value.get_secret_value()):
        raise PydanticCustomError("no_url", "must be a URL such as http://127.0.0.1:4318")
    return value


def _is_http(url: str) -> bool:
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018 - reading it is what checks it
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and bool(parts.hostname)


def _check_field(value: SecretStr) -> SecretStr:
    text = value.get_secret_value()
    if not (text.isascii() and text.isprintable()):
        raise PydanticCustomError(
            "bad_value", "it has a line end or another character that no header can hold"
        )
    return value


# RFC 9110, 5.6.2
FIELD_NAME: Final = r"^[A-Za-z0-9!#$%&'*+.^_`|~-]{1,64}$"
FieldName = Annotated[str, StringConstraints(pattern=FIELD_NAME)]
FieldValue = Annotated[SecretStr, AfterValidator(_check_field)]


class TracesConfig(Section):
    """Traces of requests, sent to an OpenTelemetry collector. They need the extra `otel`."""

    endpoint: Annotated[SecretStr | None, AfterValidator(_check_endpoint), EmptyIsNone] = setting(
        None,
        "URL of a collector that takes OTLP over HTTP, such as http://127.0.0.1:4318; spans are sent to"
        " /v1/traces there. Empty: there are no traces.",
    )
    headers: dict[FieldName, FieldValue] = setting(
        {}, "Header fields for the collector, such as {authorization: '${OTLP_TOKEN}'}."
    )
    sample: float = setting(
        1.0,
        "Share of the requests that are traced (0..1), unless their client decides.",
        ge=0,
        le=1,
    )
    trust_clients: bool = setting(
        False,
        "Whether the `traceparent` of a client names the trace that its request belongs to, and decides"
        " whether it is recorded. Otherwise the request begins a trace of its own, with a link to the client's.",
    )
