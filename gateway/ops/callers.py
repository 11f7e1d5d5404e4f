"""Whose requests lately ended badly by their callers' doing: what each worker saw, and all of them together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import msgspec


class Callers(msgspec.Struct, frozen=True):
    """What one worker saw in the last five minutes, by the id of a key; workers tell it each other."""

    over_limit: dict[str, int] = {}  # requests that a limit refused
    why_over: dict[str, str] = {}  # what the last of them was told
    stalled: dict[str, int] = {}  # streams cut, as their client did not read
    slow: dict[str, float] = {}  # seconds for which a client has not read, at this moment
    unknown_models: int = 0  # requests for models that nobody serves
    unknown_model: str = ""  # what the last of them was told
    uploading: dict[str, int] = {}  # requests of which more is to come, at this moment, by backend


def together(every: Iterable[Callers]) -> Callers:
    """Return what several workers saw; of what was told last, what any of them told."""
    over_limit, stalled, uploading = Counter[str](), Counter[str](), Counter[str]()
    why_over: dict[str, str] = {}
    slow: dict[str, float] = {}
    unknown_models, unknown_model = 0, ""
    for each in every:
        over_limit.update(each.over_limit)
        stalled.update(each.stalled)
        uploading.update(each.uploading)
        why_over = each.why_over | why_over
        slow |= {key: max(for_s, slow.get(key, 0.0)) for key, for_s in each.slow.items()}
        unknown_models += each.unknown_models
        unknown_model = unknown_model or each.unknown_model
    return Callers(over_limit, why_over, stalled, slow, unknown_models, unknown_model, uploading)
