-- Note who serves a session, and for whom. ARGV: session, generation, worker, milliseconds of its lease, credential.
-- Returns 0, and 1 where the generation is current.

local sid = ARGV[2]
local is_current = look_up(sid) == ARGV[3]
if is_current then
  -- A lease of before may have run out, where the worker was slow.
  call('SET', P .. 'w:' .. ARGV[4], 1, 'PX', ARGV[5])
  call('HSET', session_key(sid), 'w', ARGV[4], 'k', ARGV[6])
end
save_streams()
return {evicted, is_current and 1 or 0}
