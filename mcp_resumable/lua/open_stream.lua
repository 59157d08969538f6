-- Open a stream for an execution of a request. ARGV: session, generation, request id, how its stream's name ends, and
-- where the call began: generation counter and ordinal, '' for here.
-- Returns the number of evicted events, and the ordinal; or the current generation, '' where there is none.

local sid, generation, request_id, ending, counter, ordinal = unpack(ARGV, 2, 7)
local key = session_key(sid)
local actual = look_up(sid)
local result
if not actual or call('HEXISTS', key, 'd') == 1 then
  result = ''
elseif actual ~= generation then
  result = actual
else
  local earlier = call('HGET', key, 'L' .. request_id)
  if earlier then drop_stream(load_stream(sid, generation, earlier)) end
  result = call('HINCRBY', key, 'o', 1) - 1
  local name = result .. ending
  if counter == '' then counter, ordinal = call('HGET', key, 'c'), result end
  call('HSET', key, name, cmsgpack.pack({0, 0, 0, 0, 0, ''}), 'L' .. request_id, name,
    'S' .. result, cmsgpack.pack({name, tonumber(counter), tonumber(ordinal), request_id}))
  call('HINCRBY', key, 'u', 1)
  local session_bytes, total_bytes = charge(sid, STREAM_CHARGE + #request_id)
  enforce_ceilings(sid, generation, session_bytes, total_bytes, nil)
  ring_bell(sid, '*')
end
save_streams()
return {evicted, result}
