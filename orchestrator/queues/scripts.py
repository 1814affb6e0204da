"""Every Lua script of the queue, in one place; `keys` says which keys they work on.

Reservations are counters per incarnation (`<shard>.<epoch>|kv`, `|slots`, `|bytes`, `|records`) and change
only together with the lease that holds them: `kv|bytes|decode.epoch|prefill.epoch|<grant as JSON>`.
Epochs stay strings in Lua: its numbers are doubles and would round them.  Redis 6.2 or later.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from orchestrator.queues.keys import Keys as Keys

SCHEMA_VERSION = "2"


@dataclass(frozen=True, slots=True)
class Script:
    """A Lua script, called by its digest."""

    text: str
    sha: str = field(init=False)

    def __post_init__(self) -> None:
        digest = hashlib.sha1(self.text.encode(), usedforsecurity=False).hexdigest()
        object.__setattr__(self, "sha", digest)


_SHARED = """
local function add(reserved, incarnation, part, amount)
  redis.call('HINCRBY', reserved, incarnation .. '|' .. part, amount)
end
-- A counter that is absent went with its incarnation, and stays absent.
local function sub(reserved, incarnation, part, amount)
  local field = incarnation .. '|' .. part
  if redis.call('HINCRBY', reserved, field, -amount) <= 0 then redis.call('HDEL', reserved, field) end
end
local function book(change, reserved, lease)
  local kv, bytes, decode, prefill = string.match(lease, '^(%d+)|(%d+)|([^|]*)|([^|]*)|')
  change(reserved, decode, 'kv', kv)
  change(reserved, decode, 'slots', 1)
  if prefill ~= '' then
    change(reserved, prefill, 'bytes', bytes)
    change(reserved, prefill, 'records', 1)
  end
end
local function withdraw(tickets, queued, handle, group)
  local id = redis.call('HGET', queued, handle)
  if not id then return false end
  redis.call('HDEL', queued, handle)
  redis.pcall('XACK', tickets, group, id)
  redis.call('XDEL', tickets, id)
  return true
end
local function free(leases, reserved, handle)
  local lease = redis.call('HGET', leases, handle)
  if not lease then return false end
  redis.call('HDEL', leases, handle)
  book(sub, reserved, lease)
  return true
end
local function now_ms()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end
-- Milliseconds since this Redis first saw the deployment.
local function age_ms(born)
  local at = redis.call('GET', born)
  if not at then
    at = string.format('%d', now_ms())
    redis.call('SET', born, at)
  end
  return now_ms() - at
end
-- A sign of life.  After none for so long, Redis stood still: gateways went on, and have to tell first.
local function pulse(born, seen, most_ms)
  local now, last = now_ms(), redis.call('GET', seen)
  redis.call('SET', seen, string.format('%d', now))
  if last and (now - last > tonumber(most_ms) or now < tonumber(last)) then
    redis.call('SET', born, string.format('%d', now))
  end
end
local function told(completions, text)
  redis.call('XADD', completions, 'MAXLEN', '~', 50000, '*', 'b', text)
end
-- The lease of a handle is this one now, whatever it was.
local function rebook(leases, reserved, handle, lease)
  free(leases, reserved, handle)
  book(add, reserved, lease)
  redis.call('HSET', leases, handle, lease)
end
-- End what Redis holds for a gateway and `open` does not name; how many requests, and what there was.
local function sweep(leases, queued, reserved, tickets, completions, group, open)
  local ended, known = 0, {{}, {}}
  for which, key in ipairs({leases, queued}) do
    for _, handle in ipairs(redis.call('HKEYS', key)) do
      known[which][handle] = true
      if not open[handle] then
        free(leases, reserved, handle)
        withdraw(tickets, queued, handle, group)
        told(completions, cjson.encode({handle = handle, outcome = 'cancelled'}))
        ended = ended + 1
      end
    end
  end
  return ended, known[1], known[2]
end
"""


def _with_shared(text: str) -> Script:
    return Script(_SHARED + text)


SUBMIT = Script("""
-- KEYS tickets queued leases gateways  ARGV handle ticket queue_size gateway  -> queued | full
-- Idempotent by handle, so that it may be repeated after a lost answer, also one that was decided meanwhile.
-- Whatever a gateway leaves in Redis is found by the reaper, even if it was reaped a moment ago.
if redis.call('HEXISTS', KEYS[2], ARGV[1]) == 1 or redis.call('HEXISTS', KEYS[3], ARGV[1]) == 1 then
  return 'queued'
end
if redis.call('XLEN', KEYS[1]) >= tonumber(ARGV[3]) then return 'full' end
redis.call('SADD', KEYS[4], ARGV[4])
redis.call('HSET', KEYS[2], ARGV[1], redis.call('XADD', KEYS[1], '*', 'b', ARGV[2]))
return 'queued'
""")

COMMIT = _with_shared("""
-- KEYS leader born tickets gateway queued leases grants reserved decode-shard prefill-shard gateways pulse
-- ARGV leader ('' for a gateway's own decision) handle lease group settle_ms
--      decode-incarnation prefill-incarnation ('' for mixed)
--      kv slots decode-requests prefill-requests bytes   (what each shard can be promised at most)  gateway
-- -> {granted | duplicate | gone | silent | fenced | behind | settling | stale | full, lease}
local own, handle, lease, reserved = ARGV[1] == '', ARGV[2], ARGV[3], KEYS[8]
local leader = redis.call('GET', KEYS[1])
if not own and leader ~= ARGV[1] then return {'fenced', ''} end
local held = redis.call('HGET', KEYS[6], handle)
if held then
  withdraw(KEYS[3], KEYS[5], handle, ARGV[4])
  return {'duplicate', held}
end
local ticket = redis.call('HGET', KEYS[5], handle)
if not own and not ticket then return {'gone', ''} end
if not own and redis.call('EXISTS', KEYS[4]) == 0 then return {'silent', ''} end
-- While a conductor leads, a gateway may only help the ticket that is first in the queue, and not even that
-- one where the conductor has just looked at it: then it waits for a reason.
if own and leader and ticket then
  if redis.call('GET', KEYS[12]) == leader then return {'behind', ''} end
  local first = redis.call('XRANGE', KEYS[3], '-', '+', 'COUNT', 1)[1]
  if first and first[1] ~= ticket then return {'behind', ''} end
end
-- A Redis that has just come up, or woken up, waits until the gateways have told what they hold.
if age_ms(KEYS[2]) < tonumber(ARGV[5]) then return {'settling', ''} end

-- Shards that no conductor publishes any more may still serve; one that is published must be ready.
local function usable(key, incarnation)
  local seen = redis.call('HMGET', key, 'state', 'incarnation')
  if not seen[2] then return not leader end
  return seen[1] == 'ready' and seen[2] == incarnation
end
local function count(incarnation)
  local found = redis.call('HMGET', reserved, incarnation .. '|kv', incarnation .. '|slots',
    incarnation .. '|records', incarnation .. '|bytes')
  return (found[1] or 0) + 0, (found[2] or 0) + 0, (found[3] or 0) + 0, (found[4] or 0) + 0
end
local kv, bytes = string.match(lease, '^(%d+)|(%d+)|')
local decode, prefill = ARGV[6], ARGV[7]
if not usable(KEYS[9], decode) or (prefill ~= '' and not usable(KEYS[10], prefill)) then
  return {'stale', ''}
end
local used, slots, records = count(decode)
if used + kv > tonumber(ARGV[8]) or slots + 1 > tonumber(ARGV[9]) or slots + records + 1 > tonumber(ARGV[10])
  then return {'full', ''} end
if prefill ~= '' then
  local _, mixed, records, outstanding = count(prefill)
  if mixed + records + 1 > tonumber(ARGV[11]) or outstanding + bytes > tonumber(ARGV[12]) then
    return {'full', ''}
  end
end
book(add, reserved, lease)
redis.call('HSET', KEYS[6], handle, lease)
withdraw(KEYS[3], KEYS[5], handle, ARGV[4])
if own then
  redis.call('SADD', KEYS[11], ARGV[13])
else
  local grant = string.match(lease, '^%d+|%d+|[^|]*|[^|]*|(.*)$')
  redis.call('XADD', KEYS[7], 'MAXLEN', '~', 10000, '*', 'b', grant)
end
return {'granted', lease}
""")

REFUSE = _with_shared("""
-- KEYS leader tickets queued grants  ARGV leader handle refusal group  -> refused | gone | fenced
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 'fenced' end
if not withdraw(KEYS[2], KEYS[3], ARGV[2], ARGV[4]) then return 'gone' end
redis.call('XADD', KEYS[4], 'MAXLEN', '~', 10000, '*', 'b', ARGV[3])
return 'refused'
""")

COMPLETE = _with_shared("""
-- KEYS tickets queued leases reserved completions  ARGV handle completion group  -> 1 | 0
-- Ends a request wherever it stands, once: a ticket is withdrawn, a lease is freed.
local queued = withdraw(KEYS[1], KEYS[2], ARGV[1], ARGV[3])
local held = free(KEYS[3], KEYS[4], ARGV[1])
if not queued and not held then return 0 end
told(KEYS[5], ARGV[2])
return 1
""")

RELAYED = _with_shared("""
-- KEYS leases reserved completions  ARGV handle lease relayed  -> 1 | 0
-- The record has been imported: the prefill shard's part is freed, once; what decode holds stays.
local held = redis.call('HGET', KEYS[1], ARGV[1])
if not held then return 0 end
local kv, bytes, decode, prefill = string.match(held, '^(%d+)|(%d+)|([^|]*)|([^|]*)|')
if prefill == '' then return 0 end
local kv_now, _, decode_now = string.match(ARGV[2], '^(%d+)|(%d+)|([^|]*)|')
if kv == kv_now and decode == decode_now then
  sub(KEYS[2], prefill, 'bytes', bytes)
  sub(KEYS[2], prefill, 'records', 1)
  redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
else
  -- The gateway serves another grant than the one that Redis knows.
  rebook(KEYS[1], KEYS[2], ARGV[1], ARGV[2])
end
told(KEYS[3], ARGV[3])
return 1
""")

HEARTBEAT = _with_shared("""
-- KEYS gateway gateways queued leases reserved tickets completions born seen
-- ARGV gateway ttl_ms group standstill_ms granted-count granted... queued...
-- -> handles that Redis does not know
-- What the gateway has open is the truth: whatever else Redis holds for it is freed.
pulse(KEYS[8], KEYS[9], ARGV[4])
redis.call('SET', KEYS[1], '1', 'PX', ARGV[2])
redis.call('SADD', KEYS[2], ARGV[1])
local open, missing, first_queued = {}, {}, 6 + ARGV[5]
for i = 6, #ARGV do open[ARGV[i]] = true end
local _, leased, waits = sweep(KEYS[4], KEYS[3], KEYS[5], KEYS[6], KEYS[7], ARGV[3], open)
for i = 6, #ARGV do
  local handle = ARGV[i]
  if not leased[handle] and not (i >= first_queued and waits[handle]) then missing[#missing + 1] = handle end
end
return missing
""")

RESTORE = _with_shared("""
-- KEYS leases reserved queued tickets gateways  ARGV handle lease group gateway
-- The gateway already serves this request: its lease stands, whatever the room.
redis.call('SADD', KEYS[5], ARGV[4])
withdraw(KEYS[4], KEYS[3], ARGV[1], ARGV[3])
if redis.call('HGET', KEYS[1], ARGV[1]) == ARGV[2] then return 0 end
rebook(KEYS[1], KEYS[2], ARGV[1], ARGV[2])
return 1
""")

TABLE = Script("""
-- KEYS leader mode gateways tickets reserved shards  ARGV shard-key-prefix
-- -> {leader, mode, gateways, tickets, reserved (flat), then name, state, view, problem per shard}
-- view is '' for a shard that has never answered, problem where there is none.
local out = {redis.call('GET', KEYS[1]) or '', redis.call('GET', KEYS[2]) or '', redis.call('SCARD', KEYS[3]),
  redis.call('XLEN', KEYS[4]), redis.call('HGETALL', KEYS[5])}
for _, name in ipairs(redis.call('SMEMBERS', KEYS[6])) do
  local seen = redis.call('HMGET', ARGV[1] .. name, 'state', 'view', 'problem')
  if seen[1] then
    out[#out + 1] = name
    out[#out + 1] = seen[1]
    out[#out + 1] = seen[2] or ''
    out[#out + 1] = seen[3] or ''
  end
end
return out
""")

LEAD = _with_shared("""
-- KEYS leader fence born seen  ARGV conductor ttl_ms standstill_ms  -> leader value, '' when another leads
pulse(KEYS[3], KEYS[4], ARGV[3])
local leader = redis.call('GET', KEYS[1])
if not leader then
  leader = ARGV[1] .. ':' .. redis.call('INCR', KEYS[2])
  redis.call('SET', KEYS[1], leader, 'PX', ARGV[2])
  return leader
end
if string.sub(leader, 1, #ARGV[1] + 1) ~= ARGV[1] .. ':' then return '' end
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return leader
""")

RESIGN = Script("""
-- KEYS leader  ARGV leader
if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end
return 0
""")

PUBLISH = Script("""
-- KEYS leader shards
-- ARGV leader ttl_ms shard-key-prefix, then name state incarnation view problem per shard
-- -> published | fenced.  What is not named is removed; view '' leaves a shard without one.
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 'fenced' end
local named = {}
for i = 4, #ARGV, 5 do
  local name, key = ARGV[i], ARGV[3] .. ARGV[i]
  named[name] = true
  redis.call('SADD', KEYS[2], name)
  redis.call('HSET', key, 'state', ARGV[i + 1], 'incarnation', ARGV[i + 2], 'problem', ARGV[i + 4])
  if ARGV[i + 3] ~= '' then redis.call('HSET', key, 'view', ARGV[i + 3]) end
  redis.call('PEXPIRE', key, ARGV[2])
end
for _, name in ipairs(redis.call('SMEMBERS', KEYS[2])) do
  if not named[name] then
    redis.call('SREM', KEYS[2], name)
    redis.call('DEL', ARGV[3] .. name)
  end
end
return 'published'
""")

RETIRE = Script("""
-- KEYS leader reserved  ARGV leader field...  -> retired | fenced.  Counters of an incarnation that is gone.
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 'fenced' end
for i = 2, #ARGV do redis.call('HDEL', KEYS[2], ARGV[i]) end
return 'retired'
""")

REAP = _with_shared("""
-- KEYS gateways reserved tickets completions born seen
-- ARGV key-prefix group standstill_ms settle_ms  -> requests that were ended
-- While Redis stood still, no heart was heard: nobody is dead before all could beat again.
pulse(KEYS[5], KEYS[6], ARGV[3])
if age_ms(KEYS[5]) < tonumber(ARGV[4]) then return 0 end
local ended = 0
for _, gateway in ipairs(redis.call('SMEMBERS', KEYS[1])) do
  if redis.call('EXISTS', ARGV[1] .. 'gateway:' .. gateway) == 0 then
    local leases, queued = ARGV[1] .. 'leases:' .. gateway, ARGV[1] .. 'queued:' .. gateway
    ended = ended + sweep(leases, queued, KEYS[2], KEYS[3], KEYS[4], ARGV[2], {})
    redis.call('DEL', ARGV[1] .. 'grants:' .. gateway)
    redis.call('SREM', KEYS[1], gateway)
  end
end
return ended
""")

ENTER = _with_shared("""
-- KEYS schema born  ARGV version  -> version found.  First call of every process, and after a restart.
redis.call('SET', KEYS[1], ARGV[1], 'NX')
age_ms(KEYS[2])
return redis.call('GET', KEYS[1])
""")

ALL = (
    SUBMIT,
    COMMIT,
    REFUSE,
    COMPLETE,
    RELAYED,
    HEARTBEAT,
    RESTORE,
    TABLE,
    LEAD,
    RESIGN,
    PUBLISH,
    RETIRE,
    REAP,
    ENTER,
)
