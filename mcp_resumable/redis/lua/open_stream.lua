-- Open streams, each for an execution of a request. ARGV, for each: session, generation, request id, how its stream's
-- name ends, stamp, and where the call began: generation counter and ordinal, '' for here.
-- The stamp of the request's newest stream says that this very stream was opened already; a lower one, that this was
-- given up while it was on its way.
-- Returns, after the number of evicted events, for each: the ordinal; or the current generation, '' where there is none.

local function open_stream(sid, generation, request_id, ending, stamp, counter, ordinal)
  local key = session_key(sid)
  local actual = look_up(sid)
  if not actual or call('HEXISTS', key, 'd') == 1 then return '' end
  local earlier = call('HGET', key, 'L' .. request_id)
  local last = ''
  if earlier then last = cmsgpack.unpack(call('HGET', key, 'S' .. string.match(earlier, '^%d+')))[5] end
  if actual ~= generation or is_given_up(stamp, last) then return actual end
  if stamp == last then return tonumber(string.match(earlier, '^%d+')) end
  if earlier then drop_stream(load_stream(sid, generation, earlier)) end
  local opened = call('HINCRBY', key, 'o', 1) - 1
  local name = opened .. ending
  if counter == '' then counter, ordinal = call('HGET', key, 'c'), opened end
  call('HSET', key, name, cmsgpack.pack({0, 0, 0, 0, 0, ''}), 'L' .. request_id, name,
    'S' .. opened, cmsgpack.pack({name, tonumber(counter), tonumber(ordinal), request_id, stamp}))
  call('HINCRBY', key, 'u', 1)
  local session_bytes, total_bytes = charge(sid, STREAM_CHARGE + #request_id)
  enforce_ceilings(sid, generation, session_bytes, total_bytes, nil)
  ring_bell(sid, '*')
  return opened
end

local results = {0}
for at = 2, #ARGV, 7 do results[#results + 1] = open_stream(unpack(ARGV, at, at + 6)) end
save_streams()
results[1] = evicted
return results
