"""Settings of what is kept of usage."""

from __future__ import annotations

from gateway.config.units import Section, Size, setting


class UsageConfig(Section):
    """The ledger of usage: a line for each request, in `<state>/usage`."""

    enabled: bool = setting(
        True, "Whether it is written. Without it usage is counted in memory, and Redis is not told."
    )
    ledger: Size = setting(
        "256MiB",
        "Most bytes of the ledger of each process; the oldest lines go first. A line has about 200 bytes.",
    )
