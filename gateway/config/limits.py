"""Settings of the public listener: what one client may make the gateway hold, and for how long.

Sizes are bytes and `64MiB` in the file, durations are float seconds and `30s`.
"""

from __future__ import annotations

from gateway.config.units import Duration, Section, Size, setting


class LimitsConfig(Section):
    """Bounds of what one client may make us hold."""

    max_body: Size = setting("64MiB", "Largest JSON request body.")
    max_audio_body: Size = setting("32MiB", "Largest audio upload.")
    max_header_bytes: Size = setting("32KiB", "Largest request head.")
    max_headers: int = setting(64, "Most request headers.", ge=1)
    stream_buffer: Size = setting("256KiB", "Most unsent bytes held for one slow reader.")


class TimeoutsConfig(Section):
    """Deadlines of each step of a request; none is infinite."""

    header: Duration = setting("10s", "For the client to send its request head.")
    body: Duration = setting(
        "30s",
        "For the client to send its whole request body; time in which we do not read is not counted.",
    )
    connect: Duration = setting("1s", "To connect to a backend.")
    first_byte: Duration = setting("600s", "From the request to the backend's first byte.")
    stall: Duration = setting("45s", "Longest silence of a backend in a running stream.")
    total: Duration = setting("3600s", "Longest whole request.")
    client_write: Duration = setting("60s", "Longest time a client may leave bytes unread.")
    heartbeat: Duration = setting("15s", "Silence after which a stream gets a comment line.")
    keep_alive: Duration = setting("75s", "Idle client connections; longer than the proxy's 60s.")
    upstream_keep_alive: Duration = setting("3s", "Idle backend connections; vLLM closes at 5s.")
    tokenize: Duration = setting("2s", "For a backend to count a prompt.")
