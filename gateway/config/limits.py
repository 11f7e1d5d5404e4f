"""Settings of the public listener: what one client may make the gateway hold, and for how long.

Sizes are bytes and `64MiB` in the file, durations are float seconds and `30s`.
"""

from __future__ import annotations

import ipaddress
import re
from typing import Annotated, Final

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from gateway.config.units import Duration, OrWord, Section, Size, setting
from gateway.core.addresses import UNIX

_BUFFER_PARTS: Final = 8

Count = Annotated[int, Field(ge=1)]


class LimitsConfig(Section):
    """Bounds of what one client may make us hold."""

    max_body: Size = setting(
        "32MiB",
        "Largest JSON request body. Images in it are base64: Anthropic's API takes 32 MB, OpenAI's 50 MB of images.",
    )
    bodies: Size = setting(
        "512MiB",
        "Most bytes of request bodies held at a time, at least `max_body`; those below 64KiB do not count. One key may "
        "hold as much as is left for the others: alone, half of it. A body waits for room as long as "
        "`timeouts.body`. The process needs up to three times as much memory.",
    )
    max_audio_body: Size = setting("32MiB", "Largest audio upload.")
    max_header_bytes: Size = setting("32KiB", "Largest request head.")
    max_headers: int = setting(64, "Most request headers.", ge=1)
    connections: Annotated[Count | None, OrWord("auto", None)] = setting(
        "auto",
        "Most client connections. auto: as many as the process's file descriptors allow, 10,000 at"
        " most. A new one beyond that takes the place of a refused, slow or idle one; one whose"
        " request is being answered is never closed for it. Never more than descriptors allow.",
    )
    connections_per_address: Annotated[Count | None, OrWord("auto", None)] = setting(
        "auto",
        "Most connections of one client address (of 64 bits in IPv6). auto: half of `connections`,"
        " and no bound for loopback and `trusted_proxies`. A number holds for them too, as it is the"
        " address that connects which counts: behind a proxy it bounds all clients together, and the"
        " proxy should bound each. UNIX sockets have no address.",
    )
    failed_keys: Count = setting(
        60,
        "Requests without a valid key that one client address gets a 401 for in a minute; further ones get"
        " 429. Requests with a valid key never count. The same holds for the admin token.",
    )
    max_reply: Size = setting(
        "64MiB",
        "Largest reply of a backend that is not an event stream; embeddings of many texts are the largest.",
    )
    stream_buffer: Size = setting("256KiB", "Most unsent bytes held for one slow reader.")

    @property
    def all_bodies(self) -> int:
        """Most bytes that bodies hold together: `bodies`, and never less than one body needs."""
        return max(self.bodies, self.max_body)

    @property
    def buffer_bytes(self) -> int:
        """Bytes that each buffer of a stream may hold.

        A stalled one holds its write buffer, one read (twice the receive buffer), and copies of both.
        """
        return self.stream_buffer // _BUFFER_PARTS


class TimeoutsConfig(Section):
    """Deadlines of each step of a request; none is infinite."""

    header: Duration = setting("10s", "For the client to send its request head.")
    body: Duration = setting(
        "30s",
        "For the client to send its whole request body; time in which we do not read is not counted."
        " A body that is not needed any more is read for 2 s at most.",
    )
    connect: Duration = setting("1s", "To connect to a backend.")
    first_byte: Duration = setting(
        "600s",
        "From sending a request to a backend until its first byte, or a stream's first event. It"
        " starts again while the backend's metrics show that its engine makes progress. A request that the"
        " engine has surely forgotten goes elsewhere after `stall`.",
    )
    stall: Duration = setting(
        "45s",
        "Longest silence of a backend within its reply. It starts again while the backend's"
        " metrics show progress: a tool parser may hold back its text for minutes. A stream without tools goes"
        " on elsewhere then, if nothing waited at its backend meanwhile.",
    )
    total: Duration = setting(
        "3600s", "Longest whole request, from its head to the end of its reply, waiting included."
    )
    client_write: Duration = setting("60s", "Longest time a client may leave bytes unread.")
    heartbeat: Duration = setting("15s", "Silence after which a stream gets a comment line.")
    keep_alive: Duration = setting("75s", "Idle client connections; longer than the proxy's 60s.")
    upstream_keep_alive: Duration = setting("3s", "Idle backend connections; vLLM closes at 5s.")
    tokenize: Duration = setting("2s", "For a backend to count a prompt.")


# --- calls from web pages ---------------------------------------------------------------------------

_ORIGIN: Final = re.compile(r"[a-z][a-z0-9+.-]*://[^\s/?#@,;*\"]+")
_DEFAULT_PORT: Final = re.compile(r"http://.*:80|https://.*:443")


def _check_origin(value: str) -> str:
    if value == "*":
        return value
    if value != value.lower() or _ORIGIN.fullmatch(value) is None:
        raise PydanticCustomError(
            "bad_origin",
            "must be an origin in lower case such as https://app.example, without a path, or *",
        )
    if _DEFAULT_PORT.fullmatch(value):
        raise PydanticCustomError("bad_origin", "leave out the default port: browsers do")
    return value


Origin = Annotated[str, AfterValidator(_check_origin)]


def _check_proxy(value: str) -> str:
    if value != UNIX:
        try:
            network = ipaddress.ip_network(value, strict=False)
        except ValueError:
            raise PydanticCustomError(
                "bad_proxy", "must be an address, a network such as 10.0.0.0/8, or unix"
            ) from None
        address = value.partition("/")[0]
        if network.network_address != ipaddress.ip_address(address):
            raise PydanticCustomError(
                "bad_proxy",
                "{value} is no network; write {network}, or {address} for that address",
                {"value": value, "network": str(network), "address": address},
            )
    return value


Proxy = Annotated[str, AfterValidator(_check_proxy)]


class CorsConfig(Section):
    """Which web pages may call the gateway from a browser."""

    origins: tuple[Origin, ...] = setting(
        (),
        "Origins whose pages may read replies, such as https://app.example, or * for any page."
        " Pages still need an API key. Empty: none.",
    )
    max_age: Duration = setting("10m", "How long a browser may cache the permission.")
