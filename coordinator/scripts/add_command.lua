-- Leaves a command for the master.
--
-- KEYS  1 list of commands
-- ARGV  1 entry             a random id, a space, a name
--       2 limit             entries that the list may have
-- Returns 1, or 0 where the list is full. Twice is once, until the master has taken the entry.
local entries = redis.call('LRANGE', KEYS[1], 0, -1)
for _, entry in ipairs(entries) do
  if entry == ARGV[1] then
    return 1
  end
end
if #entries >= tonumber(ARGV[2]) then
  return 0
end
redis.call('RPUSH', KEYS[1], ARGV[1])
return 1
