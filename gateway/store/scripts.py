"""What Redis runs for us, each script as one step that nothing can come between.

Keys begin with `gw1:`, the version of their format: whoever changes what a key holds raises it, so
that gateways of two versions, side by side during an upgrade, do not misread each other. A script is
called by its SHA-1 once it was sent, so two versions of a script never meet either. The keys of one call share a
{tag}, and so a node of a Redis Cluster. Time is the server's. None of it needs more than Redis 6.2.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

PREFIX: Final = "gw1:"
BUDGET_S: Final = 0.2  # for one call

_NOW_MS: Final = """
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
"""


Lost = Callable[[bool], None]  # told whether a script that was sent may have run all the same
Late = Callable[[Any], None]  # told what a script returned to whoever had given up


class Scripted(Protocol):
    """What runs scripts: a Redis (`store.link.Link`, without the library that it needs), or the parent of workers."""

    @property
    def trouble(self) -> str:
        """Why it does not answer, for people; empty: it does, as far as is known."""

    async def ask(
        self,
        script: Script,
        keys: Sequence[str],
        args: Sequence[str | int],
        within_s: float = BUDGET_S,
        late: Late | None = None,
    ) -> Any:
        """Run a script and return what it does, or give up after `within_s`.

        `late` hears what it returned if that comes after all.

        Raises:
            StoreUnavailable: there is no reply in time; whether it ran is unknown.
        Cancel: it may run nevertheless.
        """

    def post(
        self, script: Script, keys: Sequence[str], args: Sequence[str | int], lost: Lost | None = None
    ) -> None:  # fmt: skip
        """Have a script run after what was asked before, if Redis answers; only `lost` hears whether it did not.

        One that Redis has forgotten, as after SCRIPT FLUSH, runs after what is sent with it.
        """


@dataclass(frozen=True, slots=True)
class Script:
    """A script, and the name by which Redis knows it once it has run."""

    text: str
    sha: str = field(init=False)

    def __post_init__(self) -> None:
        digest = hashlib.sha1(self.text.encode(), usedforsecurity=False)
        object.__setattr__(self, "sha", digest.hexdigest())


# KEYS: lease, fence. ARGV: holder, its time in ms, the longest time of any lease in ms.
# A lease that would last longer than any was given when the server's clock was another: it is void.
ACQUIRE: Final = Script("""
local held = redis.call('GET', KEYS[1])
local own = ARGV[1] .. ':'
if held and held:sub(1, #own) ~= own and redis.call('PTTL', KEYS[1]) <= tonumber(ARGV[3]) then
  return 0
end
local token = redis.call('INCR', KEYS[2])
redis.call('SET', KEYS[1], own .. token, 'PX', ARGV[2])
return token
""")

# KEYS: lease. ARGV: holder:token, its time in ms.
RENEW: Final = Script("""
if redis.call('GET', KEYS[1]) ~= ARGV[1] then
  return 0
end
return redis.call('PEXPIRE', KEYS[1], ARGV[2])
""")

# KEYS: lease. ARGV: holder:token.
RELEASE: Final = Script("""
if redis.call('GET', KEYS[1]) ~= ARGV[1] then
  return 0
end
return redis.call('DEL', KEYS[1])
""")

# KEYS: claim. ARGV: a word that names this claimant's call, its time in ms.
CLAIM: Final = Script("""
if redis.call('SET', KEYS[1], ARGV[1], 'NX', 'PX', ARGV[2]) then
  return 1
end
return redis.call('GET', KEYS[1]) == ARGV[1] and 1 or 0
""")

# KEYS: holds, a hash of scopes: the end in ms since the epoch, `inf`, or minus the time until which
# it is told that the hold was lifted. ARGV: scope, its time in ms or `inf`.
HOLD: Final = Script(
    _NOW_MS
    + """
local ends = ARGV[2]
if ends ~= 'inf' then
  ends = string.format('%.0f', now_ms + ends)
end
redis.call('HSET', KEYS[1], ARGV[1], ends)
return 1
"""
)

# KEYS: holds. ARGV: scope, how long that is told, in ms.
LIFT: Final = Script(
    _NOW_MS
    + """
redis.call('HSET', KEYS[1], ARGV[1], string.format('-%.0f', now_ms + ARGV[2]))
return 1
"""
)

# KEYS: holds. Returns scope, what is left in ms (or `inf`, or `lifted`), scope, ...
HOLDS: Final = Script(
    _NOW_MS
    + """
local every, found = redis.call('HGETALL', KEYS[1]), {}
for place = 1, #every, 2 do
  local scope, ends, left = every[place], every[place + 1], 'inf'
  if ends ~= 'inf' then
    local left_ms = math.abs(tonumber(ends)) - now_ms
    left = ends:sub(1, 1) == '-' and 'lifted' or string.format('%.0f', left_ms)
    if left_ms <= 0 then
      redis.call('HDEL', KEYS[1], scope)
      left = nil
    end
  end
  if left then
    found[#found + 1] = scope
    found[#found + 1] = left
  end
end
return found
"""
)

# KEYS: log, a hash of tells by their number; its state, a hash of its word, the first number and the last. ARGV:
# word, by whom, what is told (empty: nothing), after which number to read, most that are kept, most that are read,
# how long they are kept, how long the word is, in ms. Returns word, the last number read, what others told, ...
# The time is where numbers begin, so that those of a log that was lost are other ones.
TELL: Final = Script("""
local word = redis.call('HGET', KEYS[2], 'word')
if not word then
  word = ARGV[1]
  local time = redis.call('TIME')
  local begins = string.format('%.0f', time[1] * 1000000 + time[2])
  redis.call('DEL', KEYS[1])
  redis.call('HSET', KEYS[2], 'word', word, 'begins', begins, 'place', begins)
end
redis.call('PEXPIRE', KEYS[2], ARGV[8])
if word ~= ARGV[1] then
  return {word, 0}
end
local own, kept = ARGV[2] .. ' ', tonumber(ARGV[5])
local place = tonumber(redis.call('HGET', KEYS[2], 'place'))
if ARGV[3] ~= '' then
  place = redis.call('HINCRBY', KEYS[2], 'place', 1)
  redis.call('HSET', KEYS[1], place, own .. ARGV[3])
  redis.call('HDEL', KEYS[1], place - kept)
  redis.call('PEXPIRE', KEYS[1], ARGV[7])
end
local begins, after = tonumber(redis.call('HGET', KEYS[2], 'begins')), tonumber(ARGV[4])
local first = math.max(begins, place - kept)
if after <= place then
  first = math.max(first, after)
end
local found = {word, math.min(place, first + ARGV[6])}
for number = first + 1, found[2] do
  local each = redis.call('HGET', KEYS[1], number)
  if each and each:sub(1, #own) ~= own then
    found[#found + 1] = each:match('^%S* (.*)$')
  end
end
return found
""")

# KEYS: replicas, a hash of ids: when it was told in ms since the epoch, a space, and what. ARGV: id, what
# it tells (empty: it goes), how long that is kept, in ms. Returns id, what, its age in ms, id, ...
# A time that is still to come was told by a clock that was wrong, and counts as now.
BEAT: Final = Script(
    _NOW_MS
    + """
if ARGV[2] == '' then
  redis.call('HDEL', KEYS[1], ARGV[1])
else
  redis.call('HSET', KEYS[1], ARGV[1], string.format('%.0f %s', now_ms, ARGV[2]))
end
local every, found = redis.call('HGETALL', KEYS[1]), {}
for place = 1, #every, 2 do
  local at, told = every[place + 1]:match('^(%d+) (.*)$')
  local age_ms = math.max(0, now_ms - tonumber(at))
  if age_ms >= tonumber(ARGV[3]) then
    redis.call('HDEL', KEYS[1], every[place])
  else
    found[#found + 1] = every[place]
    found[#found + 1] = told
    found[#found + 1] = string.format('%.0f', age_ms)
  end
end
return found
"""
)

# KEYS: a hash. ARGV: where to go on, 0 at first. Returns that (0: this was all), then field, value, field, ...
SCAN: Final = Script("return redis.call('HSCAN', KEYS[1], ARGV[1], 'COUNT', 500)")


async def fields_of(
    link: Scripted, key: str, within_s: float = BUDGET_S
) -> AsyncIterator[tuple[str, str]]:
    """Go through a hash, a part at a time, so that no call takes long; a field may come twice.

    Raises:
        StoreUnavailable: a part does not come in time.
    """
    at = "0"
    while True:
        at, flat = await link.ask(SCAN, [key], [at], within_s)
        for pair in zip(flat[::2], flat[1::2], strict=True):
            yield pair
        if str(at) == "0":
            return


# KEYS: one for each kind of value, gone afterwards. ARGV: whether lists are needed, which only shared keys are kept in.
# It tries each command that any script uses, but PUBLISH, which is not needed (a test compares).
TRY: Final = Script("""
local text, hash, set, list = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
redis.call('TIME')
redis.call('SET', text, 1)
redis.call('INCR', text)
redis.call('GET', text)
redis.call('PEXPIRE', text, 1000)
redis.call('PTTL', text)
redis.call('HSET', hash, 'a', 1)
redis.call('HINCRBY', hash, 'a', 1)
redis.call('HINCRBYFLOAT', hash, 'a', 1)
redis.call('HGET', hash, 'a')
redis.call('HMGET', hash, 'a', 'b')
redis.call('HGETALL', hash)
redis.call('HSCAN', hash, 0)
redis.call('HLEN', hash)
redis.call('HDEL', hash, 'a')
redis.call('ZADD', set, 1, 'a')
redis.call('ZCARD', set)
redis.call('ZRANGEBYSCORE', set, 0, 1)
redis.call('ZREMRANGEBYSCORE', set, 2, 3)
redis.call('ZREM', set, 'a')
if ARGV[1] == '1' then
  redis.call('LPUSH', list, 1)
  redis.call('LTRIM', list, 0, 1)
  redis.call('LINDEX', list, 0)
end
return redis.call('DEL', text, hash, set, list)
""")
