"""What Redis runs for the keys that replicas share. See `store.scripts` for what holds for every script.

    gw1:{keys}:records      a hash: the id of a key, and its version, a space, its record as JSON
    gw1:{keys}:changed      a sorted set: the id of a key, by the generation of its last change
    gw1:{keys}:generation   how many changes there were
    gw1:{keys}:history      a list: the stamp of each of the last changes, the newest first
    gw1:{keys}:pepper       what tells one pepper from another, and says nothing of it
    gw1:{keys}:used         a hash: the id of a key, and when it was last used, in ms

A change draws a random stamp. A reader that knows the generation and its stamp gets what changed since,
if that stamp is still where it was in the history. Otherwise changes were lost, as after a fail-over, or
it was away for long: it reads everything. So does one that finds fewer records than keys: none is ever
deleted, so some were lost.
"""

from __future__ import annotations

from typing import Final

from gateway.store.scripts import PREFIX, Script

_KEYS: Final = f"{PREFIX}{{keys}}:"
RECORDS: Final = f"{_KEYS}records"
CHANGED: Final = f"{_KEYS}changed"
GENERATION: Final = f"{_KEYS}generation"
HISTORY: Final = f"{_KEYS}history"
PEPPER: Final = f"{_KEYS}pepper"
USED: Final = f"{_KEYS}used"
HINTS: Final = f"{_KEYS}hints"  # a channel: the new generation, after each change

KEPT_STAMPS: Final = 256

# KEYS: records, changed, generation, history, pepper. ARGV: id, the version that it must have (empty: it
# must not be there), version and record, stamp, what tells the pepper, channel, how many stamps are kept.
# Returns what came of it: kept, changed (and what is there now), or pepper.
# Who may not publish may change keys nevertheless: readers look each second.
PUT: Final = Script("""
local pepper = redis.call('GET', KEYS[5])
if pepper and pepper ~= ARGV[5] then
  return {'pepper'}
end
local now = redis.call('HGET', KEYS[1], ARGV[1])
if (now and now:match('^%S+') or '') ~= ARGV[2] then
  return {'changed', now or ''}
end
redis.call('SET', KEYS[5], ARGV[5])
redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
local generation = redis.call('INCR', KEYS[3])
redis.call('ZADD', KEYS[2], generation, ARGV[1])
redis.call('LPUSH', KEYS[4], ARGV[4])
redis.call('LTRIM', KEYS[4], 0, ARGV[7] - 1)
redis.pcall('PUBLISH', ARGV[6], generation)
return {'kept'}
""")

# KEYS: records, changed, generation, history, pepper. ARGV: the generation that the reader knows, its
# stamp (empty: it goes on with a read), how many records it takes.
# Returns: what this is (same, since, all), generation and stamp now, what tells the pepper, the generation
# up to which this goes, then the id of each key, and its version and record.
READ: Final = Script("""
local known, most = tonumber(ARGV[1]), tonumber(ARGV[3])
local now = tonumber(redis.call('GET', KEYS[3]) or '0')
local stamp = redis.call('LINDEX', KEYS[4], 0) or ''
local reply = {'since', now, stamp, redis.call('GET', KEYS[5]) or '', now}
local lost = redis.call('HLEN', KEYS[1]) < redis.call('ZCARD', KEYS[2])
if ARGV[2] ~= '' and (lost or known > now or redis.call('LINDEX', KEYS[4], now - known) ~= ARGV[2]) then
  known, reply[1] = 0, 'all'
elseif known == now then
  reply[1] = 'same'
  return reply
elseif known > now then
  reply[1] = 'all'
  known = 0
end
local found = redis.call(
  'ZRANGEBYSCORE', KEYS[2], '(' .. known, '+inf', 'WITHSCORES', 'LIMIT', 0, most)
for place = 1, #found, 2 do
  local text = redis.call('HGET', KEYS[1], found[place])
  if text then
    reply[#reply + 1] = found[place]
    reply[#reply + 1] = text
  end
end
if #found == 2 * most then
  reply[5] = tonumber(found[#found])
end
return reply
""")

# KEYS: records, or used. ARGV: id. Returns what that has of it, or nothing.
GET: Final = Script("return redis.call('HGET', KEYS[1], ARGV[1])")

# KEYS: used. ARGV: the latest time in ms that a right clock may have noted, then id, when, id, ... The latest of them
# stays.
NOTE_USE: Final = Script("""
for place = 2, #ARGV, 2 do
  local kept = tonumber(redis.call('HGET', KEYS[1], ARGV[place]) or 0)
  if kept < tonumber(ARGV[place + 1]) or kept > tonumber(ARGV[1]) then
    redis.call('HSET', KEYS[1], ARGV[place], ARGV[place + 1])
  end
end
return 1
""")
