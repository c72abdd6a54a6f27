-- Shows the master the commands that wait, and drops those that it says are done.
--
-- KEYS  1 mastership hash   2 list of commands
-- ARGV  1 token   2 holder   3... entries that are done
-- Returns the other entries. Error FENCED where the token was replaced. Twice is once: what a lost reply carried
-- is still here.
local stored = redis.call('HMGET', KEYS[1], 'token', 'holder')
local token, stored_token = tonumber(ARGV[1]), tonumber(stored[1] or '0')
if stored_token > token or (stored_token == token and stored[2] ~= ARGV[2]) then
  return redis.error_reply('FENCED the lease has token ' .. stored_token .. ', this master has ' .. token)
end
for i = 3, #ARGV do
  redis.call('LREM', KEYS[2], 1, ARGV[i])
end
return redis.call('LRANGE', KEYS[2], 0, -1)
