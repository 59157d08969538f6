-- End a session. ARGV: session, and the generation that must be current, '' for any.
-- Returns the number of evicted events, and 1 where a session was ended.

local sid, generation = ARGV[2], ARGV[3]
local actual = look_up(sid, true)
local is_ended = actual and (generation == '' or generation == actual)
if is_ended then bury(sid, 'ended 0 0', generation == '') end
save_streams()
return {evicted, is_ended and 1 or 0}
