-- Open a stream for an execution of a request. ARGV: session, generation, request id, how its stream's name ends,
-- stamp, and where the call began: generation counter and ordinal, '' for here.
-- The stamp of the request's newest stream says that this very stream was opened already; a lower one, that this was
-- given up while it was on its way.
-- Returns the number of evicted events, and the ordinal; or the current generation, '' where there is none.

local sid, generation, request_id, ending, stamp, counter, ordinal = unpack(ARGV, 2, 8)
local key = session_key(sid)
local actual = look_up(sid)
local earlier = actual and call('HGET', key, 'L' .. request_id)
local last = ''
if earlier then last = cmsgpack.unpack(call('HGET', key, 'S' .. string.match(earlier, '^%d+')))[5] end
local result
if not actual or call('HEXISTS', key, 'd') == 1 then
  result = ''
elseif actual ~= generation or is_given_up(stamp, last) then
  result = actual
elseif stamp == last then
  result = tonumber(string.match(earlier, '^%d+'))
else
  if earlier then drop_stream(load_stream(sid, generation, earlier)) end
  result = call('HINCRBY', key, 'o', 1) - 1
  local name = result .. ending
  if counter == '' then counter, ordinal = call('HGET', key, 'c'), result end
  call('HSET', key, name, cmsgpack.pack({0, 0, 0, 0, 0, ''}), 'L' .. request_id, name,
    'S' .. result, cmsgpack.pack({name, tonumber(counter), tonumber(ordinal), request_id, stamp}))
  call('HINCRBY', key, 'u', 1)
  local session_bytes, total_bytes = charge(sid, STREAM_CHARGE + #request_id)
  enforce_ceilings(sid, generation, session_bytes, total_bytes, nil)
  ring_bell(sid, '*')
end
save_streams()
return {evicted, result}
