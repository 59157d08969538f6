-- Appends. ARGV, for each: "<generation> <stream> <1 where the last is the answer> <number of events> <stamp><session>"
-- (in one, since each argument costs the worker as much as an append costs the server), and the events. An event is "="
-- and its text, a hole is empty. The stamp that the stream had last says that this very append was stored already, and
-- its acknowledgement lost; a lower one, that it was given up, and told as a hole, while it was on its way.
-- Returns, after the number of evicted events, for each: the seq of its last event; or, where it is refused, the
-- session's current generation, '' where there is none.

local function append(at, sid, generation, name, is_answer, count, stamp)
  local key = session_key(sid)
  local f = call('HMGET', key, 'g', 'a', 'r', 'u', 'd', name)
  local actual = current(sid, f)
  if not actual or f[5] then return '' end
  if actual ~= generation or not f[6] then return actual end
  local s = kept_stream(sid, generation, name, f[6])
  if not s then return actual end
  if s.stamp == stamp then return s.mark end
  if s.drop_at ~= 0 or is_given_up(stamp, s.stamp) then return actual end

  local number = next_number('number', count) - count
  local places, text, length = {}, 0, 0
  for k = 1, count do
    local event = ARGV[at + k]
    places[#places + 1] = struct.pack('>I6', number + k) .. event
    if event == '' then s.hole = s.mark + k else text = text + #event - 1 end
    if #places == 1000 or k == count then
      length = call('RPUSH', s.list, unpack(places))
      places = {}
    end
  end
  if length ~= s.mark - s.floor + count then
    -- Evicted by the server's memory policy; what was just added stays.
    call('LTRIM', s.list, -count, -1)
    charge(sid, -(s.bytes + EVENT_CHARGE * (s.mark - s.floor)))
    s.floor, s.bytes = s.mark, 0
  end
  if length == count then
    call('ZADD', order_key(sid), number + 1, name)
    call('ZADD', P .. 'oldest', 'NX', number + 1, sid)
    keep_global_key('oldest')
    call('PEXPIRE', s.list, 2 * IDLE)
    call('PEXPIRE', order_key(sid), 2 * IDLE)
  elseif now - tonumber(f[2]) >= GRAIN then
    call('PEXPIRE', s.list, 2 * IDLE)
  end
  s.mark, s.bytes, s.stamp, s.is_changed = s.mark + count, s.bytes + text, stamp, true
  if is_answer then
    s.drop_at = now + COMPLETED
    call('HINCRBY', key, 'u', -1)
    call('ZADD', P .. 'completed', s.drop_at, name .. ' ' .. generation .. ' ' .. sid)
    keep_global_key('completed')
    call('PEXPIRE', s.list, 2 * COMPLETED)
  end
  local session_bytes, total_bytes = charge(sid, text + EVENT_CHARGE * count)
  -- Invariant: the newest event is never evicted by its own append.
  local over = s.mark - s.floor - MAX_EVENTS
  if over > 0 then evict_events(s, over) end
  while s.bytes > MAX_BYTES and s.mark - s.floor > 1 do evict_events(s, 1) end
  if session_bytes > MAX_SESSION_BYTES or total_bytes > MAX_TOTAL_BYTES then
    session_bytes, total_bytes = charge(sid, 0)
    enforce_ceilings(sid, generation, session_bytes, total_bytes, s)
  end
  ring_bell(sid, name .. ' ' .. string.format('%.0f', s.mark))
  return s.mark
end

local results = {0}
local at = 2
while at <= #ARGV do
  local generation, name, is_answer, count, rest = string.match(ARGV[at], '^(%S+) (%S+) (%d) (%d+) (.*)$')
  count = tonumber(count)
  local stamp, sid = string.sub(rest, 1, 14), string.sub(rest, 15)
  results[#results + 1] = append(at, sid, generation, name, is_answer == '1', count, stamp)
  at = at + 1 + count
end
save_streams()
results[1] = evicted
return results
