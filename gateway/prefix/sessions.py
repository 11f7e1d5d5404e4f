"""Which sessions one backend served lately: a hint for prompts whose hashes tell less.

A backend that served a session probably has the session's last prompt and output in its cache. Only the
client's word stands for that. So the hint lasts ten minutes, only changes the cost of a choice, and each
reply corrects it.
"""

from __future__ import annotations

from itertools import islice
from typing import Final

import msgspec

from gateway.core.prefix import SentPrompt, Session

LIFETIME_S: Final = 600.0  # after a longer pause, a busy engine has used its cache for others
MOST_SESSIONS: Final = 4096  # of about 200 bytes


class _Last(msgspec.Struct, gc=False):
    tokens: int  # of its last prompt, and the output expected of it
    at: float
    trust: float = 1.0  # the part of what was expected that its last reply confirmed


class Sessions:
    """The sessions of one backend. The pool table owns it."""

    __slots__ = ("last",)

    def __init__(self) -> None:
        self.last: dict[int, _Last] = {}  # by key; the one used longest ago comes first

    def __len__(self) -> int:
        """Return how many are kept."""
        return len(self.last)

    def tokens(self, session: Session, prompt_tokens: int) -> int:
        """Return how many tokens of a prompt are probably cached, judging by its session alone."""
        last = self.last.get(session.key)
        if last is None or session.at - last.at > LIFETIME_S:
            return 0
        return int(last.trust * min(last.tokens, prompt_tokens))

    def sent(self, sent: SentPrompt) -> None:
        """Note that a prompt was sent here. `session_tokens` becomes what its session had cached here before."""
        prefix, session = sent.prefix, sent.prefix.session
        if session is None:
            return
        tokens = prefix.prompt_tokens + prefix.output_tokens
        last = self.last.pop(session.key, None)
        if last is not None and session.at - last.at <= LIFETIME_S:
            sent.session_before = last.tokens
            sent.session_tokens = min(last.tokens, prefix.prompt_tokens)
            last.tokens, last.at = tokens, session.at
            self.last[session.key] = last
            return
        if len(self.last) >= MOST_SESSIONS:
            self.last = dict(islice(self.last.items(), MOST_SESSIONS // 2, None))
        self.last[session.key] = _Last(tokens, session.at)

    def unsent(self, sent: SentPrompt) -> None:
        """Undo `sent`: the request ended before its first token. What came later stays."""
        session = sent.prefix.session
        last = None if session is None else self.last.get(session.key)
        if session is not None and last is not None and last.at == session.at:
            last.tokens = sent.session_before
            if not last.tokens:
                del self.last[session.key]

    def ended(
        self, sent: SentPrompt, cached_tokens: int | None, prompt_tokens: int | None = None
    ) -> None:
        """Note that a prompt was read, and correct the session's trust.

        `cached_tokens` of `prompt_tokens` is what the reply reports. If it reports nothing, the hashes of the
        prompt tell.
        """
        session, found = sent.prefix.session, cached_tokens
        if found and prompt_tokens:  # as many of those that it was taken for
            found = found * sent.prefix.prompt_tokens // prompt_tokens
        if session is None or not sent.session_tokens:
            return
        if found is None and sent.prefix.keys:
            found = sent.known_tokens
        last = self.last.get(session.key)
        if last is not None and found is not None:
            last.trust = min(1.0, found / sent.session_tokens)

    def forget(self) -> None:
        """Note that the cache is empty: the process restarted, or its cache was reset."""
        self.last = {}
