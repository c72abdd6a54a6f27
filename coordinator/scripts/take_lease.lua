-- Makes a holder the master, with a token and an epoch above everything that is known.
--
-- KEYS  1 mastership hash   2 lease
-- ARGV  1 holder            name of one life of a process
--       2 address           host:port
--       3 seen token        highest that the caller knows of
--       4 seen epoch        likewise
--       5 replaces          token whose lease may be taken although it has not run out; 0 for none
--       6 lease             milliseconds
-- Returns {1, token, epoch, record or ''}, or {0, token, address} where another's lease stands.
--
-- Twice is once: the holder of the last token gets the same again, and an epoch that nobody has committed.
local stored = redis.call('HMGET', KEYS[1], 'token', 'holder', 'address', 'epoch', 'record')
local token, epoch, record = tonumber(stored[1] or '0'), tonumber(stored[4] or '0'), stored[5] or ''
local committed = record ~= '' and cjson.decode(record).epoch or 0
local seen_token, seen_epoch = tonumber(ARGV[3]), tonumber(ARGV[4])

if stored[2] ~= ARGV[1] or token < seen_token then
  local leased = redis.call('GET', KEYS[2])
  if leased and leased ~= ARGV[5] then
    return {0, tonumber(leased), stored[3] or ''}
  end
  token = math.max(token, seen_token) + 1
  committed = epoch
end
epoch = math.max(epoch, seen_epoch + 1, committed + 1)
redis.call('HSET', KEYS[1], 'token', token, 'holder', ARGV[1], 'address', ARGV[2], 'epoch', epoch)
redis.call('SET', KEYS[2], token, 'PX', ARGV[6])
return {1, token, epoch, record}
