-- Reads the mastership at one moment.
--
-- KEYS  1 mastership hash   2 lease
-- Returns {token, epoch, epoch of the record, address, holder, 1 where the lease has not run out}; the holder is ''
-- once it has given the lease up. Zeros and '' where there never was a master.
local stored = redis.call('HMGET', KEYS[1], 'token', 'epoch', 'address', 'holder', 'record')
local committed = stored[5] and cjson.decode(stored[5]).epoch or 0
local is_leased = redis.call('EXISTS', KEYS[2])
local token, epoch = tonumber(stored[1] or '0'), tonumber(stored[2] or '0')
return {token, epoch, committed, stored[3] or '', stored[4] or '', is_leased}
