-- Claim the next generation of a session. ARGV: session, nonce, 1 where a session that is over begins again, worker.
-- The nonce of the current generation says that this very claim was made already: nothing changes.
-- Returns the number of evicted events, and the generation, '' where the session is over; and 1 where that is so for
-- this worker, since it served the session when an operator ended it: another's claim takes that away.

sweep(16)
local sid, nonce, create, worker = ARGV[2], ARGV[3], ARGV[4] == '1', ARGV[5]
local key = session_key(sid)
local before = look_up(sid)
local result = ''
local is_ended = not before and call('HGET', key, 'z') == worker
if before and string.match(before, '%-(.*)') == nonce then
  result = before
elseif before or create and not is_ended then
  local f = call('HMGET', key, 'c', 'w', 'k', 'd')
  empty_session(sid)
  call('ZREM', P .. 'past', sid)
  result = begin_generation(sid, tonumber(f[1] or 0) + 1, nonce)
  if not create then
    call('HSET', key, 'w', f[2] or '', 'k', f[3] or '')
    if f[4] then call('HSET', key, 'd', f[4]) end
  end
  ring_bell(sid, '*')
  notify_owner(sid, f[2], 'moved 0 0')
  while call('ZCARD', P .. 'sessions') > MAX_SESSIONS do
    evict_session(call('ZRANGE', P .. 'sessions', 0, 0)[1])
  end
end
save_streams()
return {evicted, result, is_ended and 1 or 0}
