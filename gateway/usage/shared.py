"""Usage on Redis: the sums of all gateways, by day, tenant, key, model, adapter, and alias of a model.

Each ledger is sent from the line after the last that Redis counted. So each request counts once, even if it is sent
twice. A Redis that came back empty gets all that the ledgers still have.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Final

import msgspec

from gateway.store.scripts import PREFIX, Script, Scripted, fields_of
from gateway.usage.entries import Entry, Place, Sums, summed

_KEPT_MS: Final = 400 * 86_400_000  # 400 days
_JOURNALS: Final = f"{PREFIX}{{usage}}:ledgers"
_MEASURES: Final = ("requests", "input", "cached", "output", "money")

# KEYS: a hash with the last line that was counted of each ledger, then a hash for each day.
# ARGV: ledger, the line that was counted last, the last one of these, how long a hash is kept in ms, then for each
# sum: the place of its day in KEYS, the field, the amount. Returns the last line that is counted by now.
# Where another one was counted last, nothing is: they were counted already, or a Redis lacks lines before them.
_COUNT: Final = Script("""
local counted = tonumber(redis.call('HGET', KEYS[1], ARGV[1])) or 0
if counted ~= tonumber(ARGV[2]) then
  return counted
end
for at = 5, #ARGV, 3 do
  redis.call('HINCRBYFLOAT', KEYS[tonumber(ARGV[at])], ARGV[at + 1], ARGV[at + 2])
end
for place = 2, #KEYS do
  redis.call('PEXPIRE', KEYS[place], ARGV[4])
end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
return tonumber(ARGV[3])
""")

# The mark is a field beside the ledgers, so that a loss takes both.
_COUNTED: Final = Script("return redis.call('HMGET', KEYS[1], ARGV[1], 'mark')")
# ARGV: ledger, the last line that was counted, and the line that is the last one from now on.
_GO_BACK: Final = Script("""
if redis.call('HGET', KEYS[1], ARGV[1]) == ARGV[2] then
  redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
end
return 1
""")
_MARK: Final = Script("redis.call('HSET', KEYS[1], 'mark', ARGV[1]) return ARGV[1]")


class SharedUsage:
    """What replicas count together. Each call may raise `StoreUnavailable`."""

    def __init__(self, link: Scripted) -> None:
        self._link = link

    async def counted(self, journal_id: str) -> tuple[int, str]:
        """Return the last line of a ledger that was counted, and the mark; empty: there is none."""
        counted, mark = await self._link.ask(_COUNTED, (_JOURNALS,), (journal_id,))
        return int(counted or 0), mark or ""

    async def go_back(self, journal_id: str, counted: int, last: int) -> None:
        """Let Redis count anew from the last line of a ledger that lost lines after it."""
        await self._link.ask(_GO_BACK, (_JOURNALS,), (journal_id, counted, last))

    async def leave_mark(self) -> str:
        """Leave and return a new mark: it says that lines of before were sent again."""
        return str(await self._link.ask(_MARK, (_JOURNALS,), (secrets.token_hex(8),)))

    async def count(self, journal_id: str, counted: int, entries: Sequence[Entry]) -> int:
        """Count the lines of a ledger behind the last counted one, all or none; return the last one by now."""
        sums = summed(entries)
        days = sorted({place[0] for place in sums})
        args: list[str | int] = [journal_id, counted, entries[-1].n, _KEPT_MS]
        for place, each in sums.items():
            day = days.index(place[0]) + 2
            for alias, part in {"": each, **(each.asked or {})}.items():
                for measure in _MEASURES:
                    if amount := getattr(part, measure):
                        field = _field(place, measure, alias)
                        args += [day, field, f"{amount:.9f}".rstrip("0").rstrip(".")]
        keys = (_JOURNALS, *map(_day_key, days))
        return int(await self._link.ask(_COUNT, keys, args))

    async def read(self, days: Sequence[str]) -> dict[Place, Sums]:
        """Return what was used on some days."""
        found: dict[Place, Sums] = {}
        for day in days:
            async for field, amount in fields_of(self._link, _day_key(day)):
                tenant, key, model, adapter, counted = msgspec.json.decode(field)
                measure, _, alias = counted.partition("/")
                if measure not in _MEASURES:  # of another version
                    continue
                sums = found.setdefault((day, tenant, key, model, adapter), Sums())
                if alias:
                    sums = sums.of_alias(alias)
                value = float(amount)
                setattr(sums, measure, value if measure == "money" else round(value))
        return found


def _day_key(day: str) -> str:
    return f"{PREFIX}{{usage}}:{day}"


def _field(place: Place, measure: str, alias: str) -> str:
    """Return the field of a sum, with `input`, or `input/gpt-4o` for what was asked for by that alias."""
    counted = f"{measure}/{alias}" if alias else measure
    return msgspec.json.encode((*place[1:], counted)).decode()
