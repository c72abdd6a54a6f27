-- Gives a lease up, because the group has ended: there is nothing that another master could take over.
--
-- KEYS  1 mastership hash   2 lease   3 list of commands, which were for this group and end with it
-- ARGV  1 token   2 holder
-- Returns 1 where the lease was this holder's, 0 where it is another's. Twice is once.
local stored = redis.call('HMGET', KEYS[1], 'token', 'holder')
if stored[1] ~= ARGV[1] or stored[2] ~= ARGV[2] then
  return 0
end
redis.call('HSET', KEYS[1], 'holder', '')
redis.call('DEL', KEYS[2], KEYS[3])
return 1
