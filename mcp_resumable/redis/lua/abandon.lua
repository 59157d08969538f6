-- Give up a session whose owner is dead: what it has not answered will not be answered. What is complete stays. ARGV:
-- session.
-- Returns the number of evicted events, and 1 where the owner is dead, or the session over.

local sid = ARGV[2]
local key = session_key(sid)
local generation = look_up(sid)
local is_dead = true
if generation then
  local f = call('HMGET', key, 'w', 'd')
  if not f[2] then
    is_dead = f[1] and f[1] ~= '' and call('EXISTS', P .. 'w:' .. f[1]) == 0
    if is_dead then
      call('HSET', key, 'd', 1, 'u', 0)
      ring_bell(sid, '*')
      notify_owner(sid, f[1], 'moved 0 0')
    end
  end
end
save_streams()
return {evicted, is_dead and 1 or 0}
