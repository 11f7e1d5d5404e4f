"""What requests are handled with, made from a configuration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gateway.access.counters import PromptCounters
from gateway.access.keys import KeyRing, OpenRing
from gateway.access.tokens import Asker
from gateway.config.models import Config
from gateway.pools.table import Backend
from gateway.upstream.relay import Patience


@dataclass(slots=True)
class Settings:
    """What a reload swaps, all at once; a request keeps the settings it started with."""

    config: Config
    keys: KeyRing | OpenRing
    counters: PromptCounters
    patience: Patience


def settings_for(
    config: Config, open_asker: Callable[[Backend], Asker], before: Settings | None = None
) -> Settings:
    """Return what requests are handled with under a configuration.

    Keys and tokenizers of `before` are kept where their files have not changed. Others are read,
    which blocks: 1 ms a key, 0.8 s a tokenizer of 150,000 tokens. A thread keeps the loop free of
    the first; the tokenizers' library lets no other thread run for most of the second.

    Raises:
        ConfigError: the keys file or a tokenizer cannot be used.
    """
    timeouts = config.timeouts
    keys = None if before is None else before.keys
    if config.keys is None:
        keys = OpenRing()
    elif not isinstance(keys, KeyRing) or keys.path != config.keys.file or keys.changed():
        keys = KeyRing.load(config.keys.file)
    return Settings(
        config=config,
        keys=keys,
        counters=PromptCounters(
            config.pools,
            open_asker,
            deadline_s=timeouts.tokenize,
            before=None if before is None else before.counters,
        ),
        patience=Patience(
            first_event_s=timeouts.first_byte,
            stall_s=timeouts.stall,
            heartbeat_s=timeouts.heartbeat,
            client_write_s=timeouts.client_write,
            total_s=timeouts.total,
        ),
    )
