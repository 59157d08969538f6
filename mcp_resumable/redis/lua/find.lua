-- Who serves a session. ARGV: session.
-- Returns the number of evicted events; then generation, worker, credential, 1 where the worker lives, 1 where the
-- generation began with a fork, 1 where the session is given up, and the highest seq of the standalone stream that a
-- visitor was sent; nothing more where the session is unknown.

local sid = ARGV[2]
local generation = look_up(sid)
save_streams()
if not generation then return {evicted} end
local f = call('HMGET', session_key(sid), 'w', 'k', 'd', 'f', 'y')
local is_alive = f[1] and f[1] ~= '' and not f[3] and call('EXISTS', P .. 'w:' .. f[1]) == 1
return {
  evicted, generation, f[1] or '', f[2] or '', is_alive and 1 or 0, f[4] and 1 or 0, f[3] and 1 or 0,
  tonumber(f[5] or 0),
}
