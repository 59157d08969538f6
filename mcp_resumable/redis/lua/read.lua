-- Reads, and new readers. ARGV, for each: session, stream, generation, seq after which to read, how many. Where the
-- generation is '', the stream's newest consumer is numbered, and all workers are told but the one named in its place.
-- Returns, after a 0, for each: that number; or, of a read, '' where what follows cannot be told; else 1 where the answer
-- is reached, the places, and the number of the stream's newest consumer.
-- May be asked as often as one likes: a read changes nothing, and of two numbers the higher counts.

local function read(sid, name, generation, after, limit)
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

local function take_over(sid, name, worker)
  local key = session_key(sid)
  if call('EXISTS', key) == 0 then return 0 end
  local number = string.format('%.0f', call('HINCRBY', key, 'x', 1))
  call('HSET', key, 'X' .. name, number)
  ring_bell(sid, '+ ' .. number .. ' ' .. name)
  local owner = call('HGET', key, 'w')
  if owner ~= worker then notify_owner(sid, owner, 'taken ' .. number .. ' ' .. name) end
  return tonumber(number)
end

local results = {0}
for at = 2, #ARGV, 5 do
  local sid, name, generation = ARGV[at], ARGV[at + 1], ARGV[at + 2]
  local is_read = generation ~= ''
  results[#results + 1] = is_read and read(sid, name, generation, tonumber(ARGV[at + 3]), tonumber(ARGV[at + 4]))
    or take_over(sid, name, ARGV[at + 3])
end
return results
