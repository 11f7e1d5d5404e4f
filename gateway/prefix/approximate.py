"""A guess of what one backend's prefix cache holds, from the prompts that were sent there.

The hashes of prompts are kept in two sets, which together act as an LRU of about the cache's size:

    young    hashes that were sent, or sent again, lately. When they stand for as many tokens as the cache
             holds, this set becomes the old one, and a new young one begins.
    old      the young set before

So a hash is kept until between one and two caches full of other prompts were sent. A set has all shorter
hashes of a prompt too, so bisection finds the longest one that is there.

Replies and scrapes report how much of a prompt was cached. The part of what was expected that they
confirm is `trust`, and scales all answers. What is expected and what is found are compared for the same few
prompts at a time, as the two numbers come at different moments.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence, Set
from math import exp, floor
from typing import Final

from gateway.core.prefix import KvEvents, Prefix, PrefixIndex, SentPrompt
from gateway.prefix.news import News

UNKNOWN_CAPACITY_TOKENS: Final = 250_000  # an 8B model on a GPU of 48 GiB
MOST_KEYS: Final = 1 << 15  # in either set; each takes about 75 bytes

_MEMORY_TOKENS: Final = 100_000  # expected to be cached; what was before them weighs 1/e
# So many prompts, and cached tokens expected of them, are compared with what was read at a time.
_TELLING, _TELLING_TOKENS = 5, 4_000
_RESET_RATIO: Final = 0.1  # if less of what was expected is found, the cache was reset
# A prompt that nobody counted is taken for a token in four bytes. Text with many escapes has fewer of them, so what
# is found is compared with what was expected in the engine's tokens.
_SCALE_WEIGHT, _MOST_SCALE = 0.2, 10.0
# So much more may be found than was expected, as tokens are estimates and prompts are read meanwhile.
_MORE_RATIO, _MORE_TOKENS = 1.25, 512


class ApproximateIndex:
    """One backend's prefix cache as it probably is. See `core.prefix.PrefixIndex`."""

    __slots__ = (
        "_expected",
        "_expected_tokens",
        "_found",
        "_found_tokens",
        "_hits",
        "_lately_tokens",
        "_left_tokens",
        "_prompts",
        "_scale",
        "_sure",
        "_told",
        "_under_way_tokens",
        "_young_tokens",
        "capacity_tokens",
        "news",
        "old",
        "trust",
        "young",
    )

    def __init__(self) -> None:
        self.capacity_tokens: int | None = None
        self.trust = 1.0  # the part of what was expected that replies and scrapes confirm
        self.young: set[int] = set()
        self.old: set[int] = set()
        self._young_tokens = 0
        self._expected = self._found = 0.0  # tokens; older ones weigh less
        self._hits: float | None = None  # the engine's counter at the last scrape
        # Of prompts that were not compared yet: how many, what was expected of them, and what was found.
        self._prompts = self._expected_tokens = 0
        self._found_tokens = 0.0
        # Expected since the last scrape; None: nothing was read.
        self._lately_tokens: int | None = None
        # Expected of prompts that are not compared yet, though the engine may have counted their hits: of those under
        # way, and of those that left since the last scrape, and before each of the last two.
        self._under_way_tokens = 0
        self._left_tokens = [0, 0, 0]
        self._scale = 1.0  # tokens that prompts have, for each that they were taken for
        self._sure = True  # the engine finds no more cached than we know of
        self._told = False  # replies report cached tokens, so the counter is not needed
        self.news: News | None = None  # for other gateways, where there are any

    def __len__(self) -> int:
        """Return how many hashes are kept."""
        return len(self.young) + len(self.old)

    @property
    def kv_events(self) -> KvEvents | None:
        """None: this index uses no KV events."""
        return None

    # --- prompts ---

    def tokens(self, prefix: Prefix) -> int:
        """Return how many tokens of a prompt are probably cached."""
        return tokens_of_each([self], prefix)[0]

    def longest(self, prefix: Prefix) -> int:
        """Return the place of the longest hash of a prompt that was sent there; the number of them if none was."""
        keys = prefix.keys
        if not keys:
            return 0
        place, shortest = _place(keys, self.young), keys[-1]
        if place and shortest in self.old:
            place = min(place, bisect_left(keys, True, key=self.old.__contains__))
        return place

    def sent(self, prefix: Prefix) -> SentPrompt:
        """Note that a prompt was sent there: it counts as cached from now on."""
        keys, young, old = prefix.keys, self.young, self.old
        # Shorter ones than one that is held may have been taken back (`unsent`): so all are looked for.
        place = new = _place(keys, young) if keys else 0
        if place:
            if keys[-1] in old:
                new = min(new, bisect_left(keys, True, key=old.__contains__))
            young.update(keys)
        known_tokens = prefix.tokens_before(new)
        kept_tokens = known_tokens if new == place else prefix.tokens_before(place)
        added_tokens = prefix.prompt_tokens - kept_tokens + prefix.output_tokens
        self._young_tokens += added_tokens
        most = self.capacity_tokens or UNKNOWN_CAPACITY_TOKENS
        if self._young_tokens > most or len(young) > MOST_KEYS:
            self._grow_old()
        self._under_way_tokens += known_tokens
        news = self.news
        if news is not None:
            news.tokens += added_tokens
            if place:
                news.sent(keys, place)
        most_tokens = None
        if self._sure and new:  # all up to the next end may be alike, if anything is
            most_tokens = prefix.tokens_before(new - 1) if new < len(keys) else 0
        return SentPrompt(prefix, floor(self.trust * known_tokens), known_tokens, new, most_tokens)

    def unsent(self, sent: SentPrompt) -> None:
        """Undo `sent`: the request ended before its first token."""
        new = sent.prefix.keys[: sent.new_keys]
        self.young.difference_update(new)
        self.old.difference_update(new)
        tokens = _new_tokens(sent.prefix, sent.new_keys)
        self._young_tokens = max(0, self._young_tokens - tokens)
        if self.news is not None:
            self.news.unsent(new, tokens)

    def read(self, sent: SentPrompt) -> None:
        """Note the first token: the engine has counted by now what it found cached."""
        if not self._told and self._expect(sent, self._scale):
            self._under_way_tokens = max(0, self._under_way_tokens - sent.known_tokens)

    def over(self, sent: SentPrompt) -> None:
        """Note that a request has left; the engine keeps the prompt cached."""
        if not sent.counted:
            self._under_way_tokens = max(0, self._under_way_tokens - sent.known_tokens)
            self._left_tokens[0] += sent.known_tokens

    def forget(self) -> None:
        """Note that the cache is empty: the process restarted, maybe with other flags."""
        self._told = False
        self._drop()

    def _drop(self) -> None:
        if self.news is not None and (self.young or self.old):  # who knows nothing has no news
            self.news.forget()
        self.young, self.old, self._young_tokens = set(), set(), 0

    # --- what other gateways sent there ---

    def heard(self, news: News) -> None:
        """Take in what another gateway tells: from now on it is as if it had been sent from here."""
        if news.forgot:
            self.young, self.old, self._young_tokens = set(), set(), 0
        if news.gone:
            self.young.difference_update(news.gone)
            self.old.difference_update(news.gone)
        self.young.update(news.keys)
        self._young_tokens = max(0, self._young_tokens + news.tokens)
        most = self.capacity_tokens or UNKNOWN_CAPACITY_TOKENS
        if self._young_tokens > most or len(self.young) > MOST_KEYS:
            self._grow_old()
        if self._hits is not None and not self._told:  # the counter is of all that it was sent
            self._lately_tokens = (self._lately_tokens or 0) + news.expected_tokens
            self._prompts += news.prompts
            self._expected_tokens += news.expected_tokens

    def retell(self) -> None:
        """Have all that is sent again told again: another gateway has come, and knows nothing."""
        if len(self) > MOST_KEYS:
            self._grow_old()
        else:
            self.old |= self.young
            self.young, self._young_tokens = set(), 0

    def _grow_old(self) -> None:
        self.old, self.young, self._young_tokens = self.young, set(), 0

    # --- what was really cached ---

    def ended(
        self, sent: SentPrompt, cached_tokens: int | None, prompt_tokens: int | None = None
    ) -> None:
        """Note that a prompt was read. `cached_tokens` is what the reply reports; None: nothing."""
        if cached_tokens is not None and not self._told:
            self._told = True
            self._compare_no_more()
        scale, taken_tokens = self._scale, sent.prefix.prompt_tokens
        if prompt_tokens and taken_tokens:
            scale = min(prompt_tokens / taken_tokens, _MOST_SCALE)
            self._scale += _SCALE_WEIGHT * (scale - self._scale)
        self._expect(sent, scale)
        if self._told:
            known_tokens, found_tokens = int(scale * sent.known_tokens), cached_tokens or 0
            self._found_tokens += min(found_tokens, known_tokens)
            self._sure = _about_all_known(known_tokens, found_tokens)
            self._judge()

    def scraped(self, capacity_tokens: int | None, hits: float | None) -> None:
        """Take in a scrape: how much the cache holds, and the engine's counter of cache hits in tokens."""
        self.capacity_tokens = capacity_tokens
        before, self._hits = self._hits, hits
        self._left_tokens = [0, *self._left_tokens[:2]]
        if self._told or hits is None:
            return
        if before is None:
            self._sure = False  # an engine that ran before may have cached what others sent
        elif hits >= before:
            found_tokens, expected_tokens = hits - before, self._lately_tokens
            if found_tokens or expected_tokens is not None:
                self._sure = _about_all_known(expected_tokens or 0, found_tokens)
            self._lately_tokens = None
            self._found_tokens += found_tokens
            self._judge()

    def _expect(self, sent: SentPrompt, scale: float) -> bool:
        """Count what was expected of a prompt, once, if anything tells what is found; return whether it was now."""
        if sent.counted or not (self._told or self._hits is not None):
            return False
        sent.counted = True
        known_tokens = int(scale * sent.known_tokens)
        self._lately_tokens = (self._lately_tokens or 0) + known_tokens
        if known_tokens:
            self._prompts += 1
            self._expected_tokens += known_tokens
        news = self.news
        if news is not None:
            news.expected_tokens += known_tokens
            news.prompts += known_tokens > 0
        return True

    def _compare_no_more(self) -> None:
        """Drop what was not compared yet: it was to be found by the counter, which is not read any more."""
        self._prompts = self._expected_tokens = 0
        self._found_tokens = 0.0

    def _judge(self) -> None:
        """Compare what was found with what was expected of some prompts, as soon as they are enough.

        The engine counts a hit when it begins to read, and we count at the first token. So what is found
        beyond what was expected counts for the prompts that come next; of others' hits no more than that.
        """
        expected, found = self._expected_tokens, self._found_tokens
        coming_tokens = int(self._scale * (self._under_way_tokens + sum(self._left_tokens)))
        if self._prompts < _TELLING or expected < _TELLING_TOKENS:
            self._found_tokens = min(found, expected + max(_TELLING_TOKENS, coming_tokens))
            return
        kept = exp(-expected / _MEMORY_TOKENS)
        self._expected = kept * self._expected + expected
        self._found = kept * self._found + min(found, expected)
        self.trust = min(1.0, self._found / self._expected)
        self._prompts = self._expected_tokens = 0
        self._found_tokens = min(max(0.0, found - expected), max(expected, coming_tokens))
        if found < _RESET_RATIO * expected:
            self._drop()


def tokens_of_each(indexes: Sequence[PrefixIndex | None], prefix: Prefix) -> list[int]:
    """Return how many tokens of a prompt each is expected to hold; in one loop, as each request asks for all.

    Mostly several hold it up to the same place. So this is tried before it is looked for.
    """
    found, keys = [], prefix.keys
    place, covered_tokens = -1, 0  # not looked for yet
    longest, shortest = (keys[0], keys[-1]) if keys else (None, None)
    for index in indexes:
        if index.__class__ is not ApproximateIndex:
            found.append(0 if index is None else index.tokens(prefix))
            continue
        young = index.young
        if shortest in young:
            held = young
        elif shortest in index.old:
            held = index.old
        else:
            found.append(0)
            continue
        if longest in held:
            place, covered_tokens = 0, prefix.tokens_before(0)
        elif place < 0 or keys[place] not in held or (place and keys[place - 1] in held):
            place = bisect_left(keys, True, key=held.__contains__)
            covered_tokens = prefix.tokens_before(place)
        old = index.old
        if place and held is young and keys[place - 1] in old and shortest in old:
            place = min(place, bisect_left(keys, True, key=old.__contains__))
            covered_tokens = prefix.tokens_before(place)
        found.append(floor(index.trust * covered_tokens))  # a third of the time of `int`
    return found


def _place(keys: Sequence[int], held: Set[int]) -> int:
    """Return the place of the longest of a prompt's hashes that is held; their number if none is."""
    return bisect_left(keys, True, key=held.__contains__) if keys[-1] in held else len(keys)


def _about_all_known(expected_tokens: int, found_tokens: float) -> bool:
    """Whether an engine found no more cached than it was expected to; expectations are estimates."""
    return found_tokens <= _MORE_RATIO * expected_tokens + _MORE_TOKENS


def _new_tokens(prefix: Prefix, place: int) -> int:
    """Return how many tokens a prompt and its output add to a cache that has it up to a place."""
    return prefix.prompt_tokens - prefix.tokens_before(place) + prefix.output_tokens
