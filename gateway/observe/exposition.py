"""The text of a registry, made in small pieces.

`prometheus_client` takes 5-8 us for a line, so a few thousand lines would hold the event loop for
tens of milliseconds, with every stream waiting. Between two pieces the loop serves others. Each
family is read at one instant; two families may be a few turns apart.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from prometheus_client import Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

_SAMPLES: Final = 100  # of a piece; under a millisecond
_END: Final = b"# EOF\n"  # the last line of OpenMetrics


@dataclass(frozen=True, slots=True)
class _One(Collector):
    """A collector of one family, for the encoder."""

    family: Metric

    def collect(self) -> Iterator[Metric]:
        yield self.family


def pieces(registry: Collector, accept: str = "") -> tuple[Iterator[bytes], str]:
    """Return the text in pieces, and its content type: the newest format the scraper accepts."""
    encode, content_type = choose_encoder(accept.lower())  # media types have no case

    def made() -> Iterator[bytes]:
        for family in registry.collect():
            for start in range(0, len(family.samples) or 1, _SAMPLES):
                part = copy.copy(family)
                part.samples = family.samples[start : start + _SAMPLES]
                text = encode(_One(part)).removesuffix(_END)
                yield text if start == 0 else _without_head(text)
        if content_type.startswith("application/openmetrics-text"):
            yield _END

    return made(), content_type


def _without_head(text: bytes) -> bytes:
    """Drop the HELP, TYPE and UNIT lines, which the family's first piece has."""
    while text.startswith(b"# "):
        text = text[text.index(b"\n") + 1 :]
    return text
