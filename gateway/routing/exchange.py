"""What gateways tell each other of prompts: which hashes they sent to which backend, and what lost its cache (041).

Twenty times a second each adds what its indexes learned to a log in the shared store, and hears what the others added.
So each knows nearly as much as a gateway that is alone before all backends. What cannot be told in time is dropped,
and counted: an index is a guess, and tells again what is used again once a cache full of other prompts was sent.

Hashes are made with a word that is the log's, and with the pepper of the keys, which the store never has.
"""

from __future__ import annotations

import hmac
import random
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from struct import pack, unpack
from typing import Final

import msgspec
from xxhash import xxh3_64_intdigest

from gateway.core.aio import periodic
from gateway.core.types import Phase
from gateway.pools.table import Backend, PoolTable
from gateway.prefix.hashing import PrefixHasher
from gateway.prefix.news import MOST_NEWS, News
from gateway.prefix.ranked import approximate_engines
from gateway.store.shared import SharedStore, StoreUnavailable

_PACE_S: Final = 0.05
_CALM_S: Final = 0.25  # while nobody tells anything
_MOST_KEYS: Final = MOST_NEWS  # of all backends in one tell: 44 KiB of text
_KEY_BYTES: Final = 8
_MOST_TOKENS: Final = 1 << 40
_LOG: Final = b"name of the log"  # gateways with different secrets have different ones


class _Engine(msgspec.Struct, frozen=True, array_like=True):
    """`News` of one engine, as they are told."""

    server: int
    rank: int
    tokens: int
    keys: bytes
    gone: bytes = b""
    prompts: int = 0
    expected_tokens: int = 0
    forgot: bool = False


class _Told(msgspec.Struct, frozen=True):
    """One tell. What another version does not tell has its default."""

    is_new: bool = False  # who tells it has heard nothing before
    engines: list[_Engine] = []


_FORMAT: Final = msgspec.json.Decoder(_Told)


@dataclass(slots=True)
class PrefixExchange:
    """One task of a gateway; `id` names its life."""

    store: SharedStore
    table: PoolTable
    id: str
    hasher: PrefixHasher
    name_of: Callable[[Backend], str]  # what all gateways call a backend
    secret: Callable[[], bytes]
    count: Callable[[str, int], None]  # of hashes that were told, heard or dropped
    rng: random.Random = field(default_factory=random.Random)  # spreads when gateways tell
    _word: str = field(default_factory=lambda: secrets.token_hex(16))
    _made_with: bytes = b""  # the secret, when the word was taken
    _place: int = 0  # up to which the log was heard
    _is_new: bool = True
    _is_calm: bool = False

    def __post_init__(self) -> None:
        self._take_word(self._word, self.secret())

    async def run(self) -> None:
        """Tell and hear until cancelled."""
        await periodic(self.turn, every_s=self.pace_s, name="what was sent where", rng=self.rng)

    def pace_s(self) -> float:
        """Return after how long to tell again."""
        return _CALM_S if self._is_calm else _PACE_S

    async def turn(self) -> None:
        """Tell what was learned here, and hear what others tell. What the store does not take is dropped."""
        if (secret := self.secret()) != self._made_with:
            self._take_word(self._word, secret)
        engines, hashes = self._news()
        told = ""
        if engines or self._is_new:
            told = msgspec.json.encode(_Told(self._is_new, engines)).decode()
        log = f"prefixes {hmac.digest(secret, _LOG, 'sha256')[:4].hex()}"
        try:
            heard = await self.store.tell(log, self._word, self.id, told, self._place)
        except StoreUnavailable:
            self._is_calm = True
            self.count("dropped", hashes)
            return
        self._place = heard.place
        if heard.word != self._word:
            self.count("dropped", hashes)
            self._take_word(heard.word, secret)
            return
        self._is_new = False
        self._is_calm = not engines and not heard.told
        self.count("told", hashes)
        for text in heard.told:
            self._hear(text)

    # --- telling ---

    def _news(self) -> tuple[list[_Engine], int]:
        """Take what the indexes learned, and how many hashes that is; of what is too much some is dropped."""
        found, left, dropped = list[_Engine](), _MOST_KEYS, 0
        backends = [*self.table]
        self.rng.shuffle(backends)  # where not all can be told, it is not always the same ones
        for backend in backends:
            for rank, index in enumerate(approximate_engines(backend.prefix_index)):
                if index.news is None:  # it is new
                    index.news = News()
                if not index.news:
                    continue
                news, index.news = index.news, News()
                dropped += news.dropped
                keys, gone = news.keys, news.gone
                count = len(keys) + len(gone)
                if count > left:  # all: what is left of a prompt is worth little
                    dropped += count
                    keys, gone, count = [], [], 0
                left -= count
                # That this gateway cannot connect says nothing of the cache: others may reach it.
                forgot = news.forgot and backend.phase is not Phase.DOWN
                told = _Engine(
                    self._number(backend), rank, news.tokens, _packed(keys), _packed(gone),
                    news.prompts, news.expected_tokens, forgot,
                )  # fmt: skip
                found.append(told)
        if dropped:
            self.count("dropped", dropped)
        return found, _MOST_KEYS - left

    # --- hearing ---

    def _hear(self, text: str) -> None:
        try:
            told = _FORMAT.decode(text)
        except msgspec.DecodeError:  # of another version
            return
        if told.is_new:
            for backend in self.table:
                for index in approximate_engines(backend.prefix_index):
                    index.retell()
        servers = {self._number(each): each for each in self.table}
        hashes = 0
        for each in told.engines:
            found, news = servers.get(each.server), _read(each)
            if found is None or news is None:
                continue
            engines = approximate_engines(found.prefix_index)
            if 0 <= each.rank < len(engines):
                engines[each.rank].heard(news)
                hashes += (len(each.keys) + len(each.gone)) // _KEY_BYTES
        self.count("heard", hashes)

    # --- the word ---

    def _take_word(self, word: str, secret: bytes) -> None:
        """Hash with a word and a secret from now on. What was hashed before says nothing any more."""
        self._word, self._made_with, self._place, self._is_new = word, secret, 0, True
        made = hmac.digest(secret, f"hashes of prompts {word}".encode(), "sha256")
        self.hasher.seed = int.from_bytes(made[:_KEY_BYTES], "big")
        for backend in self.table:
            backend.forget_prefixes()
            for index in approximate_engines(backend.prefix_index):
                index.news = News()

    def _number(self, backend: Backend) -> int:
        """Return what a backend is called in a tell."""
        return xxh3_64_intdigest(self.name_of(backend).encode(), self.hasher.seed)


def _packed(keys: list[int]) -> bytes:
    return pack(f"<{len(keys)}Q", *keys)


def _read(told: _Engine) -> News | None:
    """Return news as they were told; None if they cannot be."""
    if max(len(told.keys), len(told.gone)) > _MOST_KEYS * _KEY_BYTES or (
        len(told.keys) % _KEY_BYTES or len(told.gone) % _KEY_BYTES
    ):
        return None
    news = News()
    news.keys, news.gone = _unpacked(told.keys), _unpacked(told.gone)
    news.tokens = max(-_MOST_TOKENS, min(told.tokens, _MOST_TOKENS))
    news.prompts, news.expected_tokens = max(0, told.prompts), max(0, told.expected_tokens)
    news.forgot = told.forgot
    return news


def _unpacked(data: bytes) -> list[int]:
    return [*unpack(f"<{len(data) // _KEY_BYTES}Q", data)]
