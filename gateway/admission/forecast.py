"""What is learnt to look ahead: how long outputs get, how fast a pool drains, and who comes again."""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

DEFAULT_OUTPUT_TOKENS: Final = 256  # a chat answer of a few paragraphs; public traces have 150-350

_WEIGHT: Final = 0.1  # of the newest output: the mean follows the last twenty or so
_DRAIN_S: Final = 10.0  # memory of the drain rate: long enough to hold several ends of long replies
_DRAIN_KEPT_S: Final = 60.0  # while nobody waits: what it was for long is known for two minutes
_BELIEVED_RATIO: Final = 0.5
_DRAIN_LEAST_S: Final = 1.0  # work seen for less than this tells no rate
_RETRY_LEAST_S: Final = 1.0  # Retry-After has whole seconds
_RETRY_MOST_S: Final = 30.0  # SDKs ignore waits over a minute; halved, because the rate changes
_RETRY_UNKNOWN_S: Final = 5.0  # nothing drained yet: about the length of one reply
_JITTER: Final = 0.3  # spreads those who were refused together
_FADES_S: Final = _RETRY_MOST_S  # whoever did not come back by then is hardly going to
_PROMISED_LEAST: Final = 1.0  # tokens; less is forgotten


@dataclass(slots=True)
class _Mean:
    tokens: float
    count: int


class Outputs:
    """The mean output length per (model, key), of at most `most` entries, least recently fed first out.

    What is not known is taken from the model's mean, and that from the default; either also stands
    in as the first value of a new mean, so that one odd reply says little.
    """

    def __init__(self, default_tokens: int = DEFAULT_OUTPUT_TOKENS, most: int = 10_000) -> None:
        self._default = float(default_tokens)
        self._most = most
        self._means: OrderedDict[tuple[str, str | None], _Mean] = OrderedDict()

    def __len__(self) -> int:
        """Return how many means are kept."""
        return len(self._means)

    def expect(self, model: str, key: str, max_new_tokens: int | None = None) -> int:
        """Return the expected output in tokens, never more than `max_new_tokens`."""
        tokens = math.ceil(self._mean(model, key))
        return tokens if max_new_tokens is None else min(tokens, max_new_tokens)

    def ended(self, model: str, key: str, tokens: int) -> None:
        """Learn from an output that came to its own end."""
        for entry in ((model, key), (model, None)):  # the model last: its mean outlives its keys'
            self._learn(entry, tokens)

    def cut(self, model: str, key: str, tokens: int) -> None:
        """Learn from an output that was cut (by its limit, its client, a failure): a lower bound."""
        for entry in ((model, key), (model, None)):
            if tokens > self._mean(*entry):
                self._learn(entry, tokens)

    def _mean(self, model: str, key: str | None) -> float:
        known = self._means.get((model, key)) or self._means.get((model, None))
        return known.tokens if known is not None else self._default

    def _learn(self, entry: tuple[str, str | None], tokens: int) -> None:
        mean = self._means.get(entry)
        if mean is None:
            mean = self._means[entry] = _Mean(self._mean(*entry), 1)
            if len(self._means) > self._most:
                self._means.popitem(last=False)
        self._means.move_to_end(entry)
        mean.count += 1
        mean.tokens += (tokens - mean.tokens) * max(_WEIGHT, 1 / mean.count)


class Drain:
    """How fast a pool gives back cost tokens, over the last seconds in which it had more work than room.

    Only such time counts: a pool with little to do did not drain slowly, it had little to drain. What was
    measured long ago is forgotten: the pool may have more backends now, or fewer.
    """

    def __init__(self) -> None:
        self._tokens = 0.0  # given back; fades with age, as does the next
        self._busy_s = 0.0
        self._seen = 0.0  # given back since nothing was known
        self._believed = False

    def passed(self, seconds: float, tokens: int, held_tokens: int = 0) -> None:
        """Note that in so many seconds with more work than room so many tokens were given back.

        Of a burst nothing ends at first, and that is no slow drain: it is believed once half as much has
        ended as is held.
        """
        self._seen += tokens
        self._believed = self._believed or self._seen >= _BELIEVED_RATIO * held_tokens
        kept = math.exp(-seconds / _DRAIN_S)
        self._tokens = self._tokens * kept + tokens
        self._busy_s = self._busy_s * kept + seconds

    def rested(self, seconds: float) -> None:
        """Note that for so many seconds nobody waited."""
        kept = math.exp(-seconds / _DRAIN_KEPT_S)
        self._tokens *= kept
        self._busy_s *= kept
        if self._busy_s < _DRAIN_LEAST_S:
            self._seen, self._believed = 0.0, False

    @property
    def tokens_per_s(self) -> float | None:
        """The rate; None while too little work, or no end of any, was seen."""
        known = self._believed and self._tokens > 0 and self._busy_s >= _DRAIN_LEAST_S
        return self._tokens / self._busy_s if known else None

    def eta_s(self, tokens_ahead: int) -> float | None:
        """Return in how many seconds `tokens_ahead` will have drained; None when nobody knows."""
        rate = self.tokens_per_s
        return None if rate is None else tokens_ahead / rate

    def retry_after_s(self, tokens_ahead: int, u: float) -> float:
        """Return when to come again, 1 to 30 s; `u` in [0, 1) is the caller's random number."""
        eta = self.eta_s(tokens_ahead)
        wait = _RETRY_UNKNOWN_S if eta is None else eta
        longest = _RETRY_MOST_S / (1 + _JITTER)  # so that the bounds are jittered too
        return min(max(wait, _RETRY_LEAST_S), longest) * (1 + _JITTER * u)


class Promises:
    """What was told to come again and has not yet: tokens by tenant, of at most `most` tenants.

    It is a queue outside of the queue. Without it all who are refused in one surge would be told the
    same few seconds, and meet each other again.
    """

    def __init__(self, most: int = 1000) -> None:
        self.tokens = 0.0
        self._most = most
        self._tokens: OrderedDict[str, float] = OrderedDict()  # by tenant; fades with age

    def __len__(self) -> int:
        """Return how many tenants hold a promise."""
        return len(self._tokens)

    def of(self, tenant: str) -> float:
        """Return the tokens that were promised to a tenant."""
        return self._tokens.get(tenant, 0.0)

    def made(self, tenant: str, tokens: int) -> None:
        """Note that a request of so many tokens was told to come again."""
        self._set(tenant, self.of(tenant) + tokens)
        if len(self._tokens) > self._most:
            self._set(next(iter(self._tokens)), 0.0)

    def kept(self, tenant: str, tokens: int) -> None:
        """Note that a request of so many tokens came again."""
        self._set(tenant, self.of(tenant) - tokens)

    def passed(self, seconds: float) -> None:
        """Let time pass: some never come again."""
        kept = math.exp(-seconds / _FADES_S)
        for tenant, tokens in [*self._tokens.items()]:
            self._set(tenant, tokens * kept)

    def _set(self, tenant: str, tokens: float) -> None:
        self.tokens -= self._tokens.pop(tenant, 0.0)
        if tokens >= _PROMISED_LEAST:
            self._tokens[tenant] = tokens
            self.tokens += tokens
        if not self._tokens:
            self.tokens = 0.0  # no rounding stays
