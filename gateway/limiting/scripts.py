"""The scripts that Redis runs for limits. `store.scripts` calls them; `limiting.rules` has the same rules in Python.

KEYS are the stores of a plan: for amounts, a hash of `<stamp> <used>` by field; for running requests, a sorted set
of leases by their end. A field is the place of an amount, and the period over which it counts: `0m` is
requests per minute. The stamp of a minute's field is a time in ms; of a day's or month's, which one it is.
`0m most` is the limit under which `0m` was written.
ARGV is one text of words, because each argument costs the client as much as a whole script costs Redis.
"""

from __future__ import annotations

from typing import Final

from gateway.core.limits import Amounts
from gateway.store.scripts import Script

# `level` and `keep` for a rule; `month` counts from the year 0, from the day since the epoch.
_LEVELS: Final = """
local words = {}
for word in ARGV[1]:gmatch('%S+') do
  words[#words + 1] = word
end
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
local today = math.floor(time[1] / 86400)
local function month(day)
  local shifted = day + 719468
  local era = math.floor(shifted / 146097)
  local rest = shifted - era * 146097
  local years = math.floor((rest - math.floor(rest / 1460) + math.floor(rest / 36524)
    - math.floor(rest / 146096)) / 365)
  local march = math.floor((5 * (rest - 365 * years - math.floor(years / 4) + math.floor(years / 100)) + 2) / 153)
  return (years + era * 400) * 12 + march + 2
end
local function stamp_of(kind)
  return kind == 'm' and now_ms or kind == 'd' and today or month(today)
end
local function level(store, field, most)
  local kind = field:sub(2)
  if kind == 'r' then
    redis.call('ZREMRANGEBYSCORE', KEYS[store], '-inf', now_ms)
    redis.call('ZREMRANGEBYSCORE', KEYS[store], now_ms + 300000, '+inf')
    return redis.call('ZCARD', KEYS[store])
  end
  local value, before = unpack(redis.call('HMGET', KEYS[store], field, field .. ' most'))
  local stamp, used = string.match(value or '', '^(%S+) (%S+)$')
  if not used then
    return 0
  end
  stamp, used = tonumber(stamp), tonumber(used)
  local present = stamp_of(kind)
  if stamp > present then  -- the clock was ahead then: it counts for the present time
    stamp = present
    redis.call('HSET', KEYS[store], field, string.format('%.0f %.9f', stamp, used))
  end
  if kind ~= 'm' then
    return stamp == present and used or 0
  end
  if most < (tonumber(before or 0)) then  -- the limit was lowered
    used = math.min(used, most)
  end
  return math.max(0, used - (now_ms - stamp) / 60000 * most)
end
local function noted(store, field, most)  -- the limit by which a level was kept last; a reload may have changed it
  return tonumber(redis.call('HGET', KEYS[store], field .. ' most') or most)
end
local lives_ms = {}
local function keep(store, field, most, used)
  local kind = field:sub(2)
  local value = string.format('%.0f %.9f', stamp_of(kind), used)
  if kind == 'm' then
    redis.call('HSET', KEYS[store], field, value, field .. ' most', most)
  else
    redis.call('HSET', KEYS[store], field, value)
  end
  local ms = kind == 'm' and math.ceil(used / most * 60000) + 1000
    or kind == 'd' and 2 * 86400000 or 32 * 86400000
  lives_ms[store] = math.max(lives_ms[store] or 0, ms)
end
local function expire()
  for store, ms in pairs(lives_ms) do
    if redis.call('PTTL', KEYS[store]) < ms then  -- another field of it may have to live longer
      redis.call('PEXPIRE', KEYS[store], string.format('%.0f', ms))
    end
  end
end
"""

# Words: lease, its time in ms, five costs, then four of each rule (see `limiting.plans`).
# Returns words: whether it fits, the day, and what is used of each rule now; a rule that it does not fit has a !.
TAKE: Final = Script(
    _LEVELS
    + """
local fits, levels, told = true, {}, {}
for at = 8, #words, 4 do
  local store, field, most = tonumber(words[at]), words[at + 1], tonumber(words[at + 2])
  local used = level(store, field, most)
  levels[at] = used
  if used + words[3 + field:sub(1, 1)] > most + 1e-6 then
    told[at] = '!'
    fits = fits and words[at + 3] == '0'
  end
end
local reply = {fits and '1' or '0', tostring(today)}
for at = 8, #words, 4 do
  local store, field, most = tonumber(words[at]), words[at + 1], tonumber(words[at + 2])
  local used = levels[at]
  if fits and not (told[at] and field:sub(2) == 'm') then
    used = used + words[3 + field:sub(1, 1)]
    if field:sub(2) == 'r' then
      if tonumber(words[3]) > 0 then  -- else somebody looks at what is used
        redis.call('ZADD', KEYS[store], now_ms + words[2], words[1])
        redis.call('PEXPIRE', KEYS[store], words[2])
      end
    else
      keep(store, field, most, used)
    end
  end
  reply[#reply + 1] = (told[at] or '') .. string.format('%.9f', used)
end
expire()
return table.concat(reply, ' ')
"""
)

# Words: lease, the day on which it was taken, five amounts that are used more, then four of each rule.
# What was taken on another day is not given back to this one, and a minute goes on under its newest limit. The lease
# ends first, as that takes no memory: once a script has written, a Redis whose memory is full refuses none of its
# writes. A script without a lease it refuses.
SETTLE: Final = Script(
    _LEVELS
    + """
for at = 8, #words, 4 do
  if words[at + 1]:sub(2) == 'r' then
    redis.call('ZREM', KEYS[tonumber(words[at])], words[1])
  end
end
for at = 8, #words, 4 do
  local store, field = tonumber(words[at]), words[at + 1]
  local kind, more = field:sub(2), tonumber(words[3 + field:sub(1, 1)])
  if kind ~= 'r' and (more > 0 or more < 0 and (kind == 'm' or tonumber(words[2]) == today
      or kind == 'y' and month(tonumber(words[2])) == month(today))) then
    local most = noted(store, field, words[at + 2])
    keep(store, field, most, math.max(0, level(store, field, most) + more))
  end
end
expire()
return 1
"""
)

# KEYS: a store of leases. ARGV: the time of a lease in ms, then leases. Those that Redis lost are added again.
RENEW: Final = Script("""
local time = redis.call('TIME')
local ends_ms = time[1] * 1000 + math.floor(time[2] / 1000) + ARGV[1]
for place = 2, #ARGV do
  redis.call('ZADD', KEYS[1], ends_ms, ARGV[place])
end
return redis.call('PEXPIRE', KEYS[1], ARGV[1])
""")

# Raises each level to at least what is known to be spent, because Redis may have lost it or never had it.
# Words: four of each rule of a day or a month. ARGV[2]: the day, then what was spent of each of them.
RECALL: Final = Script(
    _LEVELS
    + """
local told = {}
for word in ARGV[2]:gmatch('%S+') do
  told[#told + 1] = tonumber(word)
end
for at = 1, #words, 4 do
  local store, field, most = tonumber(words[at]), words[at + 1], tonumber(words[at + 2])
  local spent = told[(at + 7) / 4]
  if stamp_of(field:sub(2)) == (field:sub(2) == 'd' and told[1] or month(told[1]))
      and level(store, field, most) < spent then
    keep(store, field, most, spent)
  end
end
expire()
return 1
"""
)


def words(head: str, each: Amounts, rules: str) -> tuple[str]:
    """Return the one argument of a script: the first two words, the amounts, and rules."""
    return (f"{head} %.6g %.6f %.6f %.6f %.9f {rules}" % each,)


def answer(reply: str) -> tuple[bool, int, tuple[float, ...], tuple[int, ...]]:
    """Return what `TAKE` told: whether it fits, the day, what is used of each rule, and the rules that are over."""
    fits, day, *levels = reply.split()
    over = tuple([place for place, each in enumerate(levels) if each[0] == "!"])
    used = [float(each.lstrip("!")) for each in levels] if over else map(float, levels)
    return fits == "1", int(day), tuple(used), over
