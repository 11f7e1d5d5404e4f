"""What is sent and when, decided before the first byte goes: seeded Poisson arrivals of mixed requests.

Latency counts from the planned moment, so that a system that falls behind cannot hide it.
Pure: the same seed gives the same plan for every system that is compared.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

# Short common words: with their space 4 bytes, which is one token of the simulator and about one
# token of a real vocabulary.
_WORDS: Final = (
    "the sea sun sky fog dew ice rye oak elm ash bee owl fox cat dog hen cow pig ant bay inn pub "
    "map key box cup pot pan jar lid mat bed rug ink pen log axe saw nut bun pie tea jam egg ham "
    "one two six ten and but for nor yet all few any who how why now"
)


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of request: how long its prompt and its reply are, in tokens (least, most)."""

    name: str
    prompt_tokens: tuple[int, int]
    output_tokens: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Profile:
    """A mix: each kind, and how many of it are in every 20 requests."""

    name: str
    mix: tuple[tuple[Kind, int], ...]

    def only(self, kind: str) -> Profile:
        """Return the profile with a single one of its kinds."""
        return replace(self, mix=tuple(each for each in self.mix if each[0].name == kind))

    def batch(self, times: int) -> Profile:
        """Return the profile's short prompts with replies so many times as long."""
        ((short, count),) = self.only("short").mix
        least, most = short.output_tokens
        return replace(
            self, mix=((replace(short, output_tokens=(times * least, times * most)), count),)
        )

    @property
    def output_tokens(self) -> float:
        """The mean length of a reply."""
        total = sum(count * sum(kind.output_tokens) / 2 for kind, count in self.mix)
        return total / sum(count for _, count in self.mix)


@dataclass(frozen=True, slots=True)
class Phase:
    """A stretch of time with one mean rate."""

    seconds: float
    rate_per_s: float


@dataclass(frozen=True, slots=True)
class Shot:
    """One planned request. `at_s` counts from the start of the cell; `seed` makes its text."""

    at_s: float
    tenant: str
    kind: str
    prompt_tokens: int
    output_tokens: int
    seed: int

    @property
    def group(self) -> str:
        """The tenant without its number: `quiet3` is one of the quiet."""
        return self.tenant.rstrip("0123456789")


PROFILES: Final = {
    each.name: each
    for each in (
        Profile(
            "full",
            (
                (Kind("short", (64, 256), (32, 96)), 16),
                (Kind("long", (2048, 4096), (128, 384)), 4),
            ),
        ),
        # For an engine ten times slower, and for one five times faster with five times the cache.
        Profile(
            "small",
            (
                (Kind("short", (32, 128), (24, 64)), 16),
                (Kind("long", (512, 1024), (64, 192)), 4),
            ),
        ),
        Profile(
            "large",
            (
                (Kind("short", (256, 1024), (64, 192)), 16),
                (Kind("long", (8192, 16_384), (256, 512)), 4),
            ),
        ),
        # For a small model on CPU with a window of 2048 tokens: few arrivals and long outputs, so that
        # its cache fills before its processor does. Its small vocabulary takes three tokens for a word.
        Profile(
            "tiny",
            (
                (Kind("short", (12, 36), (64, 160)), 16),
                (Kind("long", (60, 160), (192, 384)), 4),
            ),
        ),
        # The same in tokens, for a simulated engine.
        Profile(
            "tight",
            (
                (Kind("short", (36, 108), (64, 160)), 16),
                (Kind("long", (180, 480), (192, 384)), 4),
            ),
        ),
    )
}


def shots(profile: Profile, tenants: Sequence[str], seed: int) -> Iterator[Shot]:
    """Give requests without end, all planned for 0: kinds in shuffled decks, tenants in turn.

    Decks, not dice: every stretch has the stated share of long requests, so that cells of a few
    hundred requests can be compared.
    """
    rng = random.Random(seed)
    while True:
        deck = [kind for kind, count in profile.mix for _ in range(count)]
        rng.shuffle(deck)
        for kind in deck:
            yield Shot(
                0.0,
                rng.choice(tenants),
                kind.name,
                rng.randint(*kind.prompt_tokens),
                rng.randint(*kind.output_tokens),
                rng.getrandbits(48),
            )


def poisson(phases: Sequence[Phase], seed: int) -> Iterator[float]:
    """Give the arrival times of a Poisson process whose mean rate changes from phase to phase.

    As many come in each phase as its rate says, at moments that are independent of each other: a load
    of exactly the capacity is to be that, whatever the seed.
    """
    rng = random.Random(seed)
    start = 0.0
    for phase in phases:
        count = round(phase.rate_per_s * phase.seconds)
        yield from sorted(start + phase.seconds * rng.random() for _ in range(count))
        start += phase.seconds


def plan(
    phases: Sequence[Phase], profile: Profile, tenants: Sequence[str], seed: int
) -> list[Shot]:
    """Plan the arrivals of one group of tenants."""
    source = shots(profile, tenants, seed)
    return [replace(next(source), at_s=at) for at in poisson(phases, seed + 1)]


def merge(*plans: list[Shot]) -> list[Shot]:
    """Put plans on one time line."""
    return sorted((shot for each in plans for shot in each), key=lambda shot: shot.at_s)


def prompt(shot: Shot, salt: int = 0) -> str:
    """Return the text of a request. No two begin alike, so that no cache holds a prefix of it.

    `salt` gives the same plan other words of the same lengths.
    """
    words = random.Random(f"{shot.seed}/{salt}").choices(_WORDS.split(), k=shot.prompt_tokens)
    return " ".join(words)
