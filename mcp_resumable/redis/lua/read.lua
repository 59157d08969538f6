-- Reads. ARGV, for each: session, generation, stream, seq after which to read, how many.
-- Returns, after a 0, for each: '' where what follows cannot be told; else 1 where the answer is reached, the places,
-- and the number of the stream's newest consumer.
-- Changes nothing, so that it may be asked as often as one likes.

local function read(sid, generation, name, after, limit)
  local f = call('HMGET', session_key(sid), 'g', 'a', 'u', name, 'd', 'X' .. name)
  if f[1] ~= generation or not f[4] then return '' end
  if now - tonumber(f[2]) >= IDLE and tonumber(f[3]) <= 0 then return '' end
  local s = load_stream(sid, generation, name, f[4])
  if s.drop_at ~= 0 and now >= s.drop_at then return '' end
  if after < s.floor or after > s.mark then return '' end
  -- Given up: what is not complete never will be.
  if f[5] and s.drop_at == 0 then return '' end
  if call('LLEN', s.list) ~= s.mark - s.floor and after < s.mark then return '' end
  local first = after - s.floor
  local places = call('LRANGE', s.list, first, first + limit - 1)
  return {s.drop_at ~= 0 and after + #places == s.mark and 1 or 0, places, tonumber(f[6] or 0)}
end

local results = {0}
for at = 2, #ARGV, 5 do
  results[#results + 1] = read(ARGV[at], ARGV[at + 1], ARGV[at + 2], tonumber(ARGV[at + 3]), tonumber(ARGV[at + 4]))
end
return results
