-- The pulse of a worker. ARGV: worker, milliseconds of its lease, sessions of it whose keys are to be kept.
-- Tells of a fork even where nobody writes any more: readers may wait for what was lost.
-- Returns the number of evicted events, the bytes that all sessions are charged, and each session that is unknown, over
-- or given up, with 1 where an operator has ended it.

call('SET', P .. 'w:' .. ARGV[2], 1, 'PX', ARGV[3])
sweep(64)
local result = {0, 0}
for at = 4, #ARGV do
  local sid = ARGV[at]
  local key = session_key(sid)
  local f = call('HMGET', key, 'g', 'd', 'r', 'z')
  local generation = f[1]
  if generation and not f[2] then
    if is_forked(f[3]) then generation = begin_after_fork(sid) end
    if not call('ZSCORE', P .. 'sessions', sid) then call('ZADD', P .. 'sessions', next_number('tick', 1), sid) end
    call('PEXPIRE', key, 2 * IDLE)
    call('PEXPIRE', order_key(sid), 2 * IDLE)
    for _, name in ipairs(call('ZRANGE', order_key(sid), 0, -1)) do
      local s = load_stream(sid, generation, name)
      if s and s.drop_at == 0 then call('PEXPIRE', s.list, 2 * IDLE) end
    end
  else
    result[#result + 1] = sid
    result[#result + 1] = f[4] == ARGV[2] and 1 or 0
  end
end
keep_global_keys()
save_streams()
result[1] = evicted
result[2] = tonumber(call('HGET', P .. 'totals', 'bytes') or 0)
return result
