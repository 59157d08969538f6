-- Note who serves a session, and for whom. ARGV: session, generation, worker, credential.
-- Returns 0, and 1 where the generation is current.

local sid = ARGV[2]
local is_current = look_up(sid) == ARGV[3]
if is_current then call('HSET', session_key(sid), 'w', ARGV[4], 'k', ARGV[5]) end
save_streams()
return {evicted, is_current and 1 or 0}
