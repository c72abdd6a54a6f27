-- Makes a record the group's membership, if its token is the last and its epoch above every other.
--
-- KEYS  1 mastership hash
-- ARGV  1 token   2 holder   3 address (host:port)
--       4 record            JSON, with its epoch
-- Returns 1. Error FENCED where the token was replaced, or another record has this epoch or a later one. Twice is once:
-- a record that stands already is committed. A call that comes late, after a later one, changes nothing.
local stored = redis.call('HMGET', KEYS[1], 'token', 'holder', 'epoch', 'record')
local token, stored_token = tonumber(ARGV[1]), tonumber(stored[1] or '0')
if stored_token > token or (stored_token == token and stored[2] ~= ARGV[2]) then
  return redis.error_reply('FENCED the lease has token ' .. stored_token .. ', this master has ' .. token)
end
local stored_record = stored[4] or ''
if stored_record == ARGV[4] then
  return 1
end
local epoch, stored_epoch = cjson.decode(ARGV[4]).epoch, tonumber(stored[3] or '0')
local committed = stored_record ~= '' and cjson.decode(stored_record).epoch or 0
if epoch < stored_epoch or epoch <= committed then
  return redis.error_reply('FENCED the store is at epoch ' .. stored_epoch .. ', the membership is for ' .. epoch)
end
redis.call('HSET', KEYS[1], 'token', token, 'holder', ARGV[2], 'address', ARGV[3], 'epoch', epoch, 'record', ARGV[4])
return 1
