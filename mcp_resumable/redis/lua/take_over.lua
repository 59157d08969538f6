-- Number a stream's newest consumer, and tell all others. ARGV: session, stream.
-- Returns 0, and the number.

local sid, name = ARGV[2], ARGV[3]
local key = session_key(sid)
if call('EXISTS', key) == 0 then return {0, 0} end
local number = string.format('%.0f', call('HINCRBY', key, 'x', 1))
call('HSET', key, 'X' .. name, number)
ring_bell(sid, '+ ' .. number .. ' ' .. name)
notify_owner(sid, call('HGET', key, 'w'), 'taken ' .. number .. ' ' .. name)
return {0, tonumber(number)}
