-- Reads the mastership at one moment.
--
-- KEYS  1 mastership hash   2 lease
-- Returns {token, epoch, record, address, holder, 1 where the lease has not run out}, numbers as they are stored; the
-- holder is '' once it has given the lease up. '0' and '' where there never was a master.
local stored = redis.call('HMGET', KEYS[1], 'token', 'epoch', 'record', 'address', 'holder')
local is_leased = redis.call('EXISTS', KEYS[2])
return {stored[1] or '0', stored[2] or '0', stored[3] or '', stored[4] or '', stored[5] or '', is_leased}
