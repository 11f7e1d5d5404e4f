"""Which sessions sent one backend their last prompt: a hint where the prompt itself tells less.

A backend that served a session is thought to hold its last prompt and output. That is only what a
client says, so it lasts a few minutes, changes nothing but what a choice costs, and each reply
corrects it.
"""

from __future__ import annotations

from itertools import islice
from typing import Final

import msgspec

from gateway.core.prefix import Sent, Session

LIFETIME_S: Final = 600.0  # who pauses longer finds the cache of a busy engine used for others
MOST_SESSIONS: Final = 4096  # of about 200 bytes


class _Last(msgspec.Struct, gc=False):
    tokens: int  # of its last prompt, and the output expected of it
    at: float
    trust: float = 1.0  # how much of what was expected was found


class Sessions:
    """The sessions of one backend, by keys that tenants do not share; the pool table owns it."""

    __slots__ = ("last",)

    def __init__(self) -> None:
        self.last: dict[int, _Last] = {}  # by key; who came first is dropped first

    def __len__(self) -> int:
        """Return how many are kept."""
        return len(self.last)

    def tokens(self, session: Session, prompt_tokens: int) -> int:
        """Return how many tokens of a prompt are thought to be cached because of its session."""
        last = self.last.get(session.key)
        if last is None or session.at - last.at > LIFETIME_S:
            return 0
        return int(last.trust * min(last.tokens, prompt_tokens))

    def sent(self, sent: Sent) -> None:
        """Note that a prompt was sent here, and in `Sent.session_tokens` what its session had here before."""
        prefix, session = sent.prefix, sent.prefix.session
        if session is None:
            return
        tokens = prefix.prompt_tokens + prefix.output_tokens
        last = self.last.get(session.key)
        if last is not None and session.at - last.at <= LIFETIME_S:
            sent.session_tokens = min(last.tokens, prefix.prompt_tokens)
            last.tokens, last.at = tokens, session.at
            return
        if len(self.last) >= MOST_SESSIONS:
            self.last = dict(islice(self.last.items(), MOST_SESSIONS // 2, None))
        self.last[session.key] = _Last(tokens, session.at)

    def unsent(self, sent: Sent) -> None:
        """Take that back: it ended before the engine was seen to read it."""
        session = sent.prefix.session
        last = None if session is None else self.last.get(session.key)
        if session is not None and last is not None:
            last.tokens = sent.session_tokens
            if not last.tokens:
                del self.last[session.key]

    def ended(self, sent: Sent, cached_tokens: int | None) -> None:
        """Note that a prompt was read; `cached_tokens` of it were found, if its reply tells.

        Else what is known of the prompt itself tells it.
        """
        session, found = sent.prefix.session, cached_tokens
        if session is None or not sent.session_tokens:
            return
        if found is None and sent.prefix.keys:
            found = sent.known_tokens
        last = self.last.get(session.key)
        if last is not None and found is not None:
            last.trust = min(1.0, found / sent.session_tokens)

    def forget(self) -> None:
        """Note that the cache is empty: another process, or it was reset."""
        self.last = {}
