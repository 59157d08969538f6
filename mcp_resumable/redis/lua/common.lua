-- What every script begins with. Above it, the Python side puts the constants of this storage:
--   P                    prefix of every key, with the hash tag that keeps them in one slot
--   IDLE, COMPLETED      retention, milliseconds
--   MAX_EVENTS, MAX_BYTES, MAX_SESSION_BYTES, MAX_TOTAL_BYTES, MAX_SESSIONS
--   MAX_REMEMBERED       earlier generations of a session whose nonces are kept
--   MAX_REST             places that a snapshot brings along
--   FORKS                whether INFO may be asked for the server's replication id
-- ARGV[1] is added to the server's clock, milliseconds; 0 but in tests.
--
-- Keys. All but the lease expire by themselves once nobody uses them; what says when is checked on access as well.
--   s:<session>                    hash, all that makes a session known; losing it loses all of the session at once:
--       c counter, g generation (absent: the session is over), N<counter> nonce, o next ordinal, u unanswered requests,
--       a active at, r replication id of the server that issued g, w owner, k credential, d 1: the owner is dead,
--       x number of the newest consumer, y highest seq of the standalone stream that a visitor was sent, f 1: g began
--       with a fork, z the owner of a session that an operator has ended, <stream> what moves, S<ordinal> what stays,
--       X<stream> x of its newest consumer, L<request id> newest stream
--   e:<generation>:<stream>:<session>   list, a place each: 6 bytes of number, then "=" and the event; a hole has none
--   o:<session>                    sorted set, streams by the number of their oldest place, or a lower one
--   oldest                         sorted set, sessions by the same
--   sessions                       sorted set, sessions by last activity
--   completed                      sorted set, "<stream> <generation> <session>" by when it is dropped
--   past                           sorted set, sessions that are over, by when their numbers are forgotten
--   charges, totals                hashes, bytes by session; bytes, numbers and ticks of all
--   w:<worker>                     the lease of a worker
-- Channels: d:<session> the doorbell of its readers, w:<worker> notices to its owner.

local EVENT_CHARGE, STREAM_CHARGE = 72, 1024
-- 2025, milliseconds: a place's number has 48 bits, enough until 2114 where 100 of them begin with each millisecond.
local NUMBERS_BEGIN = 1735689600000
-- How much older than the truth a session's last activity may be.
local GRAIN = 500

local call = redis.call
local time = call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000) + tonumber(ARGV[1])
local evicted = 0

local function session_key(sid) return P .. 's:' .. sid end
local function order_key(sid) return P .. 'o:' .. sid end
local function list_key(generation, stream, sid) return P .. 'e:' .. generation .. ':' .. stream .. ':' .. sid end

local function ring_bell(sid, message) call('PUBLISH', P .. 'd:' .. sid, message) end

local function notify_owner(sid, owner, message)
  if owner and owner ~= '' then call('PUBLISH', P .. 'w:' .. owner, message .. ' ' .. sid) end
end

-- Keys of all sessions outlive each of them.
local function keep_global_key(name) call('PEXPIRE', P .. name, 2 * (IDLE + COMPLETED)) end

local function keep_global_keys()
  for _, name in ipairs({'charges', 'totals', 'oldest', 'completed', 'sessions', 'past'}) do keep_global_key(name) end
end

-- The next `count` of a number that orders sessions, or places; returns the last of them. Where the server's memory
-- policy has taken the numbers, they begin above all that were given: with the time, faster than anybody appends.
local function next_number(field, count)
  local number = call('HINCRBY', P .. 'totals', field, count)
  if number == count then
    number = call('HINCRBY', P .. 'totals', field, math.max(0, now - NUMBERS_BEGIN) * 100)
    keep_global_key('totals')
  end
  return number
end

-- Charge a session for bytes, negative ones too. Returns what it, and all, are charged for.
local function charge(sid, bytes)
  local charges, totals = P .. 'charges', P .. 'totals'
  if bytes == 0 then return tonumber(call('HGET', charges, sid) or 0), tonumber(call('HGET', totals, 'bytes') or 0) end
  local of_session, of_all = call('HINCRBY', charges, sid, bytes), call('HINCRBY', totals, 'bytes', bytes)
  if of_all == bytes or of_session == bytes and bytes ~= STREAM_CHARGE then
    -- One of them begins anew without its session doing so: the server's memory policy has taken it.
    of_all = 0
    for _, charged in ipairs(call('HVALS', charges)) do of_all = of_all + charged end
    call('HSET', totals, 'bytes', of_all)
    keep_global_key('charges')
    keep_global_key('totals')
  end
  return of_session, of_all
end

-- Whether what has this stamp was given up while it was on its way: `last`, which was done in its place, is of the same
-- writer, and later. A stamp is 8 bytes that tell the writer, and 6 of a number that rises.
local function is_given_up(stamp, last)
  return last ~= '' and string.sub(stamp, 1, 8) == string.sub(last, 1, 8)
    and struct.unpack('>I6', stamp, 9) < struct.unpack('>I6', last, 9)
end

-- What moves of a stream, read once per script and written back at its end.
local streams = {}

local function load_stream(sid, generation, name, packed)
  local list = list_key(generation, name, sid)
  local stream = streams[list]
  if stream == nil then
    packed = packed or call('HGET', session_key(sid), name)
    if not packed then
      stream = false
    else
      local f = cmsgpack.unpack(packed)
      stream = {list = list, sid = sid, generation = generation, name = name,
        mark = f[1], floor = f[2], hole = f[3], drop_at = f[4], bytes = f[5], stamp = f[6]}
    end
    streams[list] = stream
  end
  return stream
end

local function save_streams()
  for _, s in pairs(streams) do
    if s and s.is_changed then
      call('HSET', session_key(s.sid), s.name, cmsgpack.pack({s.mark, s.floor, s.hole, s.drop_at, s.bytes, s.stamp}))
    end
  end
end

-- Events that a stream retains: its places but for the holes.
local function retained_events(s)
  if s.hole <= s.floor then return s.mark - s.floor end
  local events = 0
  for _, place in ipairs(call('LRANGE', s.list, 0, -1)) do
    if #place > 6 then events = events + 1 end
  end
  return events
end

-- Forget a stream and all that it holds.
local function drop_stream(s)
  local key = session_key(s.sid)
  local ordinal = string.match(s.name, '^%d+')
  local fixed = cmsgpack.unpack(call('HGET', key, 'S' .. ordinal))
  local request_id = fixed[4]
  call('UNLINK', s.list)
  call('HDEL', key, s.name, 'S' .. ordinal, 'X' .. s.name)
  call('ZREM', order_key(s.sid), s.name)
  if ordinal ~= '0' and call('HGET', key, 'L' .. request_id) == s.name then call('HDEL', key, 'L' .. request_id) end
  if s.drop_at == 0 then
    if ordinal ~= '0' then call('HINCRBY', key, 'u', -1) end
  else
    call('ZREM', P .. 'completed', s.name .. ' ' .. s.generation .. ' ' .. s.sid)
  end
  charge(s.sid, -(STREAM_CHARGE + #request_id + s.bytes + EVENT_CHARGE * (s.mark - s.floor)))
  streams[s.list] = false
end

local function evict_events(s, count)
  local text = 0
  for _, place in ipairs(call('LPOP', s.list, count)) do
    if #place > 6 then
      text = text + #place - 7
      evicted = evicted + 1
    end
  end
  s.floor = s.floor + count
  s.bytes = s.bytes - text
  s.is_changed = true
  charge(s.sid, -(text + EVENT_CHARGE * count))
end

-- The list may have been evicted by the server's own memory policy: then all of it counts as evicted.
local function check_list(s, length)
  local kept = s.mark - s.floor
  if length == kept then return end
  call('UNLINK', s.list)
  charge(s.sid, -(s.bytes + EVENT_CHARGE * kept))
  s.floor, s.bytes, s.is_changed = s.mark, 0, true
end

-- The oldest place of a session: its stream's name and its number. The scores are never too high; amend them.
local function oldest_of(sid, generation)
  local order = order_key(sid)
  while true do
    local first = call('ZRANGE', order, 0, 0, 'WITHSCORES')
    if not first[1] then return nil end
    local place = call('LINDEX', list_key(generation, first[1], sid), 0)
    if not place then
      call('ZREM', order, first[1])
    else
      local number = struct.unpack('>I6', place)
      if number <= tonumber(first[2]) then return first[1], number end
      call('ZADD', order, number, first[1])
    end
  end
end

-- Evict the oldest event of a session; false where there is none but the newest of the stream `newest`.
local function evict_oldest_of(sid, generation, newest)
  local name = oldest_of(sid, generation)
  if not name then return false end
  local s = load_stream(sid, generation, name)
  if not s then
    call('UNLINK', list_key(generation, name, sid))
    call('ZREM', order_key(sid), name)
    return true
  end
  check_list(s, call('LLEN', s.list))
  if s == newest and s.mark - s.floor == 1 then return false end
  if s.mark > s.floor then evict_events(s, 1) end
  if s.drop_at ~= 0 and s.mark == s.floor then drop_stream(s) end
  return true
end

-- Forget what is known of a session but for its generation numbers.
local function empty_session(sid)
  local key = session_key(sid)
  local generation = call('HGET', key, 'g')
  local gone = {}
  for _, field in ipairs(call('HKEYS', key)) do
    if string.match(field, '^%d') and generation then
      call('UNLINK', list_key(generation, field, sid))
      call('ZREM', P .. 'completed', field .. ' ' .. generation .. ' ' .. sid)
      streams[list_key(generation, field, sid)] = false
    end
    -- c, N<counter>, and the consumers' numbers, which must not begin again.
    if not string.match(field, '^N') and field ~= 'c' and field ~= 'x' then gone[#gone + 1] = field end
  end
  for at = 1, #gone, 1000 do call('HDEL', key, unpack(gone, at, math.min(at + 999, #gone))) end
  local bytes = call('HGET', P .. 'charges', sid)
  if bytes then
    call('HDEL', P .. 'charges', sid)
    call('HINCRBY', P .. 'totals', 'bytes', -bytes)
  end
  call('UNLINK', order_key(sid))
  call('ZREM', P .. 'oldest', sid)
end

-- End a session: its numbers stay used for a while, of the last MAX_SESSIONS sessions at least. So long its owner can
-- still learn of an end that `is_operators`, should the notice be lost: it would take it for an eviction, and go on.
local function bury(sid, message, is_operators)
  local key = session_key(sid)
  local owner = call('HGET', key, 'w')
  empty_session(sid)
  if is_operators and owner and owner ~= '' then call('HSET', key, 'z', owner) end
  call('PEXPIRE', key, IDLE)
  call('ZREM', P .. 'sessions', sid)
  call('ZADD', P .. 'past', now + IDLE, sid)
  keep_global_key('past')
  while call('ZCARD', P .. 'past') > MAX_SESSIONS do
    local oldest = call('ZPOPMIN', P .. 'past')[1]
    call('UNLINK', session_key(oldest))
  end
  ring_bell(sid, '*')
  notify_owner(sid, owner, message)
end

local function evict_session(sid)
  local key = session_key(sid)
  local generation = call('HGET', key, 'g')
  for _, field in ipairs(call('HKEYS', key)) do
    if generation and string.match(field, '^%d') then
      local s = load_stream(sid, generation, field)
      if s then evicted = evicted + retained_events(s) end
    end
  end
  bury(sid, 'moved 0 0')
end

local function touch(sid, active_at)
  if now - tonumber(active_at) < GRAIN then return end
  local key = session_key(sid)
  call('HSET', key, 'a', string.format('%.0f', now))
  call('ZADD', P .. 'sessions', next_number('tick', 1), sid)
  call('PEXPIRE', key, 2 * IDLE)
  call('PEXPIRE', order_key(sid), 2 * IDLE)
  keep_global_keys()
end

-- The replication id of this server, '' where it may not be asked. It changes with every promotion and restart.
local known_server
local function server()
  if known_server == nil then
    known_server = ''
    if FORKS then
      local info = redis.pcall('INFO', 'replication')
      if type(info) == 'string' then known_server = string.match(info, 'master_replid:(%x+)') or '' end
    end
  end
  return known_server
end

-- Whether a generation was begun on a server that this one may not have all of. `r` is that one's replication id.
local function is_forked(r)
  return r ~= '' and server() ~= '' and r ~= server()
end

-- Make a generation current. `nonce` is its random part.
local function begin_generation(sid, counter, nonce)
  local key = session_key(sid)
  local number = string.format('%.0f', counter)
  local generation = number .. '-' .. nonce
  call('HSET', key, 'c', number, 'N' .. number, nonce, 'g', generation, 'o', 1, 'u', 0, 'r', server(),
    'a', string.format('%.0f', now),
    '0', cmsgpack.pack({0, 0, 0, 0, 0, ''}), 'S0', cmsgpack.pack({'0', counter, 0, ''}))
  call('HDEL', key, string.format('N%.0f', counter - MAX_REMEMBERED))
  streams[list_key(generation, '0', sid)] = nil
  charge(sid, STREAM_CHARGE)
  touch(sid, 0)
  return generation
end

-- After a promotion or a restart nobody can tell which of the last events, and generations, this server never had: what
-- was issued before is not resumed. Its successor's random part is made of the new replication id, which is random.
local function begin_after_fork(sid)
  local key = session_key(sid)
  local f = call('HMGET', key, 'c', 'g', 'w', 'k', 'd')
  empty_session(sid)
  local digest = redis.sha1hex(server() .. f[2] .. sid)
  local nonce = {}
  for at = 1, 36, 3 do
    local digit = tonumber(string.sub(digest, at, at + 2), 16) % 36
    nonce[#nonce + 1] = string.sub('0123456789abcdefghijklmnopqrstuvwxyz', digit + 1, digit + 1)
  end
  local generation = begin_generation(sid, tonumber(f[1]) + 1, table.concat(nonce))
  call('HSET', key, 'w', f[3] or '', 'k', f[4] or '', 'f', 1)
  if f[5] then call('HSET', key, 'd', f[5]) end
  ring_bell(sid, '*')
  notify_owner(sid, f[3], 'moved 0 0')
  return generation
end

-- The current generation of a session that is not over, else nil. `f` holds its fields g, a, r, u. Asking for it is an
-- activity of the session, unless `is_inspection`.
local function current(sid, f, is_inspection)
  if not f[1] then return nil end
  -- A call that says nothing for an hour is not an idle session.
  if now - tonumber(f[2]) >= IDLE and tonumber(f[4]) <= 0 then
    evict_session(sid)
    return nil
  end
  if is_forked(f[3]) then return begin_after_fork(sid) end
  if not is_inspection then touch(sid, f[2]) end
  return f[1]
end

local function look_up(sid, is_inspection)
  return current(sid, call('HMGET', session_key(sid), 'g', 'a', 'r', 'u'), is_inspection)
end

-- A stream that is still kept; drops one whose time is over.
local function kept_stream(sid, generation, name, packed)
  local s = load_stream(sid, generation, name, packed)
  if s and s.drop_at ~= 0 and now >= s.drop_at then
    evicted = evicted + retained_events(s)
    drop_stream(s)
    return false
  end
  return s
end

local function enforce_ceilings(sid, generation, session_bytes, total_bytes, newest)
  while session_bytes > MAX_SESSION_BYTES do
    if not evict_oldest_of(sid, generation, newest) then break end
    session_bytes, total_bytes = charge(sid, 0)
  end
  while total_bytes > MAX_TOTAL_BYTES do
    local first = call('ZRANGE', P .. 'oldest', 0, 0, 'WITHSCORES')
    if not first[1] then break end
    local other = call('HGET', session_key(first[1]), 'g')
    local name, number
    if other then name, number = oldest_of(first[1], other) end
    if not name then
      call('ZREM', P .. 'oldest', first[1])
    elseif number > tonumber(first[2]) then
      call('ZADD', P .. 'oldest', number, first[1])
    elseif not evict_oldest_of(first[1], other, newest) then
      break
    end
    total_bytes = tonumber(call('HGET', P .. 'totals', 'bytes') or 0)
  end
end

-- Drop what is too old, up to `limit` of each kind.
local function sweep(limit)
  for _, member in ipairs(call('ZRANGEBYSCORE', P .. 'completed', '-inf', now, 'LIMIT', 0, limit)) do
    local name, generation, sid = string.match(member, '^(%S+) (%S+) (.*)$')
    if call('HGET', session_key(sid), 'g') ~= generation or not load_stream(sid, generation, name) then
      call('ZREM', P .. 'completed', member)
    else
      kept_stream(sid, generation, name)
    end
  end
  for _, sid in ipairs(call('ZRANGE', P .. 'sessions', 0, limit - 1)) do
    local f = call('HMGET', session_key(sid), 'g', 'a', 'u', 'w')
    if not f[1] then
      -- The server's memory policy has taken it.
      empty_session(sid)
      call('ZREM', P .. 'sessions', sid)
    elseif now - tonumber(f[2]) < IDLE then
      break
    elseif tonumber(f[3]) > 0 and (not f[4] or f[4] == '' or call('EXISTS', P .. 'w:' .. f[4]) == 1) then
      touch(sid, 0)
    else
      evict_session(sid)
    end
  end
  for _, sid in ipairs(call('ZRANGEBYSCORE', P .. 'past', '-inf', now, 'LIMIT', 0, limit)) do
    call('ZREM', P .. 'past', sid)
    if not call('HGET', session_key(sid), 'g') then call('UNLINK', session_key(sid)) end
  end
end
