"""What a storage's counters must say, counted anew from all that it holds."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, cast

from tests.redis.server import Server

__all__ = ["Recount", "recount"]

# For each session: what it is charged for; and whatever contradicts itself.
_SCRIPT = """
local P = ARGV[1]
local sessions, problems, completed, total = {}, {}, 0, 0
local call = redis.call
for _, key in ipairs(call('KEYS', ARGV[2])) do
  local sid = string.sub(key, #P + 3)
  local generation = call('HGET', key, 'g')
  if generation then
    local charge, open, oldest = 0, 0, nil
    local function check(is_right, what) if not is_right then problems[#problems + 1] = sid .. ' ' .. what end end
    for _, name in ipairs(call('HKEYS', key)) do
      if string.match(name, '^%d') then
        local s = cmsgpack.unpack(call('HGET', key, name))
        local mark, floor, drop_at, bytes = s[1], s[2], s[4], s[5]
        local fixed = cmsgpack.unpack(call('HGET', key, 'S' .. string.match(name, '^%d+')))
        local places = call('LRANGE', P .. 'e:' .. generation .. ':' .. name .. ':' .. sid, 0, -1)
        local text = 0
        for _, place in ipairs(places) do
          if #place > 6 then text = text + #place - 7 end
        end
        check(#places == mark - floor, name .. ' has ' .. #places .. ' places, not ' .. mark - floor)
        check(text == bytes, name .. ' has ' .. text .. ' bytes, not ' .. bytes)
        check(fixed[1] == name, name .. ' is called ' .. fixed[1])
        if #places > 0 then
          local number = struct.unpack('>I6', places[1])
          local score = tonumber(call('ZSCORE', P .. 'o:' .. sid, name) or 'inf')
          check(score <= number, name .. ' has its oldest place at ' .. number .. ', known as ' .. score)
          if not oldest or number < oldest then oldest = number end
        end
        if drop_at ~= 0 then
          completed = completed + 1
          local member = name .. ' ' .. generation .. ' ' .. sid
          check(tonumber(call('ZSCORE', P .. 'completed', member) or 0) == drop_at, name .. ' is not completed')
        elseif name ~= '0' then
          open = open + 1
        end
        charge = charge + 1024 + #fixed[4] + text + 72 * #places
      end
    end
    check(tonumber(call('HGET', key, 'u')) == open, 'has ' .. open .. ' unanswered requests')
    check(call('ZSCORE', P .. 'sessions', sid), 'is not among the sessions')
    if oldest then
      local score = tonumber(call('ZSCORE', P .. 'oldest', sid) or 'inf')
      check(score <= oldest, 'has its oldest place at ' .. oldest .. ', known as ' .. score)
    end
    local charged = tonumber(call('HGET', P .. 'charges', sid) or 0)
    check(charged == charge, 'is charged ' .. charged .. ', not ' .. charge)
    sessions[sid] = charge
    total = total + charge
  end
end
local function check(is_right, what) if not is_right then problems[#problems + 1] = what end end
local count = 0
for _ in pairs(sessions) do count = count + 1 end
check(call('ZCARD', P .. 'sessions') == count, 'sessions that are none')
check(call('HLEN', P .. 'charges') == count, 'charges of sessions that are none')
check(call('ZCARD', P .. 'completed') == completed, 'completed streams that are none')
local charged = tonumber(call('HGET', P .. 'totals', 'bytes') or 0)
check(charged == total, 'all are charged ' .. charged .. ', not ' .. total)
return cjson.encode({sessions = sessions, problems = problems, total = total})
"""


@dataclass(frozen=True)
class Recount:
    """What a storage holds.

    Attributes:
        charges: By session.
        total: Of all sessions.
        problems: What contradicts it, in words.
    """

    charges: dict[str, int]
    total: int
    problems: list[str]


def recount(server: Server, prefix: str) -> Recount:
    """Count all that a storage with this prefix holds."""
    with server.client() as client:
        answer: Any = client.eval(_SCRIPT, 0, f"{{{prefix}}}:", f"{{{prefix}}}:s:*")
    counted = cast(dict[str, Any], json.loads(answer))
    # An empty table of Lua's is spelled as an object.
    return Recount(dict(counted["sessions"]), int(counted["total"]), list(counted["problems"]))
