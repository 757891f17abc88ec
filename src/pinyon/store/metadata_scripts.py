"""The changes in Redis that are made in one step, as Lua: no other command comes between reading and writing.

They work with Redis from 6.2 on and Valkey, on one server and its replicas (a script's keys are not in one hash slot).
Each begins with ``BOOT``, which reads a node's record. A script that writes for a life looks at the record first. So a
process that has lost its name to another one (the fence) changes nothing, and a life that is back is not cleaned up. A
foreign value in place of one of our keys counts as nothing and is replaced. The keys: ``pinyon.store.metadata``."""

from __future__ import annotations

OK, FENCED, LOST = 1, -1, 0
"""A script's answers: done; another process has the name, or the life is back; the data is not as we left it."""

BOOT = """
local function text(key)
  local raw = redis.pcall('GET', key)
  return type(raw) == 'string' and raw or nil
end
local function boot(key)
  local raw = text(key)
  if not raw then return nil end
  local parsed, value = pcall(cjson.decode, raw)
  return parsed and type(value) == 'table' and type(value.boot) == 'string' and value.boot or nil
end
local function size(key)
  local count = redis.pcall('SCARD', key)
  return type(count) == 'number' and count or -1
end
local function put(key, member)
  if type(redis.pcall('SADD', key, member)) == 'number' then return end
  redis.call('DEL', key)
  redis.call('SADD', key, member)
end
"""

ANNOUNCE = """
-- KEYS node lives index written; ARGV life boot record lease_ms take_over
-- {OK: the record was there, LOST: it was not, FENCED}, publications, entries of the index
local present = boot(KEYS[1])
if ARGV[5] == '0' and present and present ~= ARGV[2] then return {-1, 0, 0} end
put(KEYS[2], ARGV[1])
redis.call('SET', KEYS[1], ARGV[3], 'PX', ARGV[4])
local written = tonumber(text(KEYS[4]) or 0) or 0
return {present == ARGV[2] and 1 or 0, written, size(KEYS[3])}
"""

LEAVE = """
-- KEYS node; ARGV boot
if boot(KEYS[1]) ~= ARGV[1] then return -1 end
redis.call('DEL', KEYS[1])
return 1
"""

WRITE = """
-- KEYS node lives index written block...; ARGV life boot number restart removed, key of each, then key and size
-- {OK, LOST or FENCED}, publications, entries of the index, values of another type that were left alone
local present = boot(KEYS[1])
if present and present ~= ARGV[2] then return {-1, 0, 0, 0} end
local number, written = tonumber(ARGV[3]), tonumber(text(KEYS[4]) or 0) or 0
if number ~= written then -- equal: the same script sent again because its answer was lost
  if number < written or (ARGV[4] == '0' and number ~= written + 1) then return {0, written, 0, 0} end
end
redis.call('SET', KEYS[4], number)
put(KEYS[2], ARGV[1])
local foreign = 0
local function try(...)
  local reply = redis.pcall(...)
  if type(reply) == 'table' and reply.err then
    if not string.find(reply.err, 'WRONGTYPE', 1, true) then error(reply.err) end
    foreign = foreign + 1
  end
end
local at, block = 6, 5
for _ = 1, tonumber(ARGV[5]) do
  try('HDEL', KEYS[block], ARGV[1])
  try('SREM', KEYS[3], ARGV[at])
  at, block = at + 1, block + 1
end
while KEYS[block] do
  try('SADD', KEYS[3], ARGV[at])
  try('HSET', KEYS[block], ARGV[1], ARGV[at + 1])
  at, block = at + 2, block + 1
end
return {1, number, size(KEYS[3]), foreign}
"""

UNLIST = """
-- KEYS node index block...; ARGV life boot key...
if boot(KEYS[1]) == ARGV[2] then return -1 end
for i = 3, #KEYS do
  redis.pcall('HDEL', KEYS[i], ARGV[1])
  redis.call('SREM', KEYS[2], ARGV[i])
end
return 1
"""

FORGET = """
-- KEYS node lives index written; ARGV life boot
if boot(KEYS[1]) == ARGV[2] then return -1 end
if size(KEYS[3]) > 0 then return 0 end
redis.call('DEL', KEYS[3], KEYS[4])
redis.call('SREM', KEYS[2], ARGV[1])
return 1
"""
