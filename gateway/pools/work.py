"""What a token costs the backends of a pool, in seconds: the unit of the choice between them. Pure.

It costs what it costs the fastest of them. A backend that had little to do has shown little pace, and
must not get less work for it; only a proven slowness (`pools.speed`) parts two backends.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import msgspec

from gateway.pools.rate import Rate

# Until a pool has shown its pace: a GPU reads about so much, and writes so much for ten streams.
_UNKNOWN_PROMPT_S: Final = 1 / 10_000
_UNKNOWN_OUTPUT_S: Final = 1 / 1_000
USUAL_TOKENS: Final = 256  # of output, of a request of which nothing is known
# The part of the time to write all outputs at a backend that does not hold up who comes: they are written side by
# side. Simulated chats at 8 backends: 0.59 of the prompts were found cached with none of it,
# 0.77 with nine tenths, 0.87 with this and with 0.99 alike (0.88 where a seer chooses).
BESIDE: Final = 0.97


class Work(msgspec.Struct, frozen=True, gc=False):
    """What a backend has to do, as the choice counts it."""

    ahead_s: float  # until all that is there is done
    waits_s: float  # of those, what holds up who comes
    slowness: float  # times a request's token cost, what the request itself takes
    streams: float  # that wait while it reads a prompt: all that are there, and the prompt's own


@dataclass(frozen=True, slots=True)
class TokenCost:
    """The seconds that one token takes of the fastest backend, when its batch is full."""

    prompt_s: float = _UNKNOWN_PROMPT_S
    output_s: float = _UNKNOWN_OUTPUT_S

    def of(self, prompt_tokens: int, output_tokens: int) -> float:
        """Return the seconds of one request; it takes a step at least."""
        return prompt_tokens * self.prompt_s + (output_tokens + 1) * self.output_s


def token_cost(reads: Iterable[Rate], writes: Iterable[Rate], now: float) -> TokenCost:
    """Return the cost by the best that any backend of a pool was seen to read and to write lately."""
    prompts = max((rate.at(now) or 0.0 for rate in reads), default=0.0)
    outputs = max((rate.at(now) or 0.0 for rate in writes), default=0.0)
    return TokenCost(
        1 / prompts if prompts else _UNKNOWN_PROMPT_S,
        1 / outputs if outputs else _UNKNOWN_OUTPUT_S,
    )
