"""The questions and changes in Redis that are one step each, as Lua: no other command comes between.

They work with Redis from 6.2 on and Valkey. All keys of a script belong to one store node and lie in one hash slot, so
they work in a Redis Cluster. A script that writes looks at the node's life first: a process that has lost its name to
another one (the fence) changes nothing. A foreign value in place of one of our keys counts as nothing and is replaced.
The keys: ``pinyon.store.metadata``."""

from __future__ import annotations

OK, FENCED, LOST = 1, -1, 0
"""A script's answers: done; another process has the name, or the node is alive; the data is not as we left it."""

_TOOLS = """
local function clean(key)
  local kind = redis.call('TYPE', key).ok
  if kind ~= 'hash' and kind ~= 'none' then redis.call('DEL', key) end
end
local function number(key)
  return tonumber(redis.call('HGET', key, 'number') or 0) or 0
end
"""

ANNOUNCE = (
    _TOOLS
    + """
-- KEYS record life blocks; ARGV boot record lease_ms take_over
-- {OK: the record was there, LOST: it was not, FENCED}, number of the last change, entries
clean(KEYS[2])
clean(KEYS[3])
local boot = redis.call('HGET', KEYS[2], 'boot')
if boot ~= ARGV[1] then
  if boot and ARGV[4] == '0' then return {-1, 0, 0} end
  redis.call('UNLINK', KEYS[2], KEYS[3])
  redis.call('HSET', KEYS[2], 'boot', ARGV[1])
end
local there = redis.call('EXISTS', KEYS[1])
redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
return {boot == ARGV[1] and there or 0, number(KEYS[2]), redis.call('HLEN', KEYS[3])}
"""
)

LEAVE = (
    _TOOLS
    + """
-- KEYS record life blocks; ARGV boot
clean(KEYS[2])
if redis.call('HGET', KEYS[2], 'boot') ~= ARGV[1] then return -1 end
redis.call('UNLINK', KEYS[1], KEYS[2], KEYS[3])
return 1
"""
)

WRITE = (
    _TOOLS
    + """
-- KEYS life blocks; ARGV boot number restart, the packed keys that go, then key and entry of those that come
-- {OK, LOST or FENCED}, number of the last change, entries
clean(KEYS[1])
clean(KEYS[2])
local boot = redis.call('HGET', KEYS[1], 'boot')
if boot and boot ~= ARGV[1] then return {-1, 0, 0} end
local now, last = tonumber(ARGV[2]), number(KEYS[1])
if now ~= last then -- equal: the same script sent again because its answer was lost
  if now < last or (ARGV[3] == '0' and now ~= last + 1) then return {0, last, 0} end
end
redis.call('HSET', KEYS[1], 'boot', ARGV[1], 'number', ARGV[2])
local gone = ARGV[4]
for at = 1, #gone, 16 do redis.call('HDEL', KEYS[2], string.sub(gone, at, at + 15)) end
for at = 5, #ARGV, 2 do redis.call('HSET', KEYS[2], ARGV[at], ARGV[at + 1]) end
return {1, now, redis.call('HLEN', KEYS[2])}
"""
)

LOCATE = """
-- KEYS blocks; ARGV packed keys
-- the first 12 bytes of each key's entry, packed; spaces where there is none
local keys, packed = {}, ARGV[1]
for at = 1, #packed / 16 do keys[at] = string.sub(packed, at * 16 - 15, at * 16) end
local found = redis.pcall('HMGET', KEYS[1], unpack(keys))
for at = 1, #keys do
  local entry = found[at]
  found[at] = entry and #entry >= 12 and string.sub(entry, 1, 12) or '            '
end
return table.concat(found)
"""

FORGET = """
-- KEYS record life blocks
if redis.call('EXISTS', KEYS[1]) == 1 then return -1 end
redis.call('UNLINK', KEYS[2], KEYS[3])
return 1
"""
