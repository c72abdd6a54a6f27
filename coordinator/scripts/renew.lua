-- Holds a lease for another while. A store that has lost data gets back what its master knows.
--
-- KEYS  1 mastership hash   2 lease   3 list of commands
-- ARGV  1 token   2 holder   3 address (host:port)
--       4 epoch             highest that the master knows of
--       5 record            the membership it committed last, JSON, or ''
--       6 lease             milliseconds
-- Returns how many commands wait. Error FENCED where the token was replaced. Twice is once.
local stored = redis.call('HMGET', KEYS[1], 'token', 'holder', 'epoch', 'record')
local token, stored_token = tonumber(ARGV[1]), tonumber(stored[1] or '0')
if stored_token > token or (stored_token == token and stored[2] ~= ARGV[2]) then
  return redis.error_reply('FENCED the lease has token ' .. stored_token .. ', this master has ' .. token)
end

local epoch = math.max(tonumber(stored[3] or '0'), tonumber(ARGV[4]))
redis.call('HSET', KEYS[1], 'token', token, 'holder', ARGV[2], 'address', ARGV[3], 'epoch', epoch)
local stored_record = stored[4] or ''
if ARGV[5] ~= '' and (stored_record == '' or cjson.decode(stored_record).epoch < cjson.decode(ARGV[5]).epoch) then
  redis.call('HSET', KEYS[1], 'record', ARGV[5])
end
redis.call('SET', KEYS[2], token, 'PX', ARGV[6])
return redis.call('LLEN', KEYS[3])
