-- Note what a visitor was sent of the standalone stream. ARGV: session, generation, seq.
-- Returns 0.

local sid = ARGV[2]
if look_up(sid) == ARGV[3] then
  local key = session_key(sid)
  if tonumber(ARGV[4]) > tonumber(call('HGET', key, 'y') or 0) then call('HSET', key, 'y', ARGV[4]) end
end
save_streams()
return {evicted}
