-- What is known of a session. ARGV: session.
-- Returns the number of evicted events, and the generation and its streams: name, request id, floor, high-water mark,
-- 1 where it is terminal, retained events and bytes of each; nothing more where it is unknown.

sweep(1000)
local sid = ARGV[2]
local generation = look_up(sid, true)
local result = {0}
if generation then
  result[2] = generation
  for _, field in ipairs(call('HKEYS', session_key(sid))) do
    local s = string.match(field, '^%d') and kept_stream(sid, generation, field)
    if s then
      check_list(s, call('LLEN', s.list))
      local fixed = cmsgpack.unpack(call('HGET', session_key(sid), 'S' .. string.match(field, '^%d+')))
      result[#result + 1] = {field, fixed[4], s.floor, s.mark, s.drop_at ~= 0 and 1 or 0, retained_events(s),
        s.bytes}
    end
  end
end
save_streams()
result[1] = evicted
return result
