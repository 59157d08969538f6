-- Snapshots. ARGV, for each: session, claimed counter, nonce, stream and its ordinal, 1 where the request id is known,
-- request id, seq.
-- Returns, after the number of evicted events, for each: '' where the session is unknown; else generation, claimed,
-- what the stream is, its high-water mark, floor, last hole, 1 where it is terminal, the places from the seq to the
-- answer where that is retained and they are few, else '', and the newest stream of the request with where its call
-- began; '' where there is none.

local function rest_of(s, seq)
  if not s or s.drop_at == 0 or seq < s.floor or seq < s.hole or seq >= s.mark or s.mark - seq > MAX_REST then
    return ''
  end
  return call('LRANGE', s.list, seq - s.floor, -1)
end

local function snapshot(sid, counter, nonce, name, ordinal, has_request_id, request_id, seq)
  local key = session_key(sid)
  local generation = look_up(sid)
  if not generation then return '' end
  local claimed = 'never'
  if counter .. '-' .. nonce == generation then
    claimed = 'current'
  elseif counter ~= '' and call('HGET', key, 'N' .. counter) == nonce then
    claimed = 'earlier'
  end
  local kind, mark, floor, hole, is_terminal = 'never_opened', 0, 0, 0, 0
  local s = claimed == 'current' and kept_stream(sid, generation, name)
  if s then check_list(s, call('LLEN', s.list)) end
  if s and s.drop_at ~= 0 and s.mark == s.floor then
    drop_stream(s)
    s = false
  end
  local newest
  if has_request_id == '1' then
    newest = call('HGET', key, 'L' .. request_id)
  elseif ordinal ~= '' then
    local fixed = call('HGET', key, 'S' .. ordinal)
    if fixed then newest = cmsgpack.unpack(fixed)[1] end
  end
  if newest and not kept_stream(sid, generation, newest) then newest = nil end
  if s then
    kind, mark, floor, hole, is_terminal = 'retained', s.mark, s.floor, s.hole, s.drop_at ~= 0 and 1 or 0
  elseif claimed == 'current' and tonumber(ordinal) < tonumber(call('HGET', key, 'o'))
    and call('HEXISTS', key, 'S' .. ordinal) == 0 then
    local is_superseded = newest and tonumber(string.match(newest, '^%d+')) > tonumber(ordinal)
    kind = is_superseded and 'superseded' or 'dropped'
  end
  local successor = {'', 0, 0}
  if newest then
    local fixed = cmsgpack.unpack(call('HGET', key, 'S' .. string.match(newest, '^%d+')))
    successor = {fixed[1], fixed[2], fixed[3]}
  end
  return {generation, claimed, kind, mark, floor, hole, is_terminal, rest_of(s, tonumber(seq)), unpack(successor)}
end

local results = {0}
for at = 2, #ARGV, 8 do results[#results + 1] = snapshot(unpack(ARGV, at, at + 7)) end
save_streams()
results[1] = evicted
return results
