"""`RedisStorage`: sessions, generations and events in Redis or Valkey, shared by any number of workers.

Each operation is one Lua script, and so atomic. All keys of a storage carry one hash tag, since the ceilings and the
order of eviction are those of all its sessions: in a cluster a storage lives on one shard, and several prefixes use
several shards.

Appends, reads and snapshots that are asked for at the same time travel together, in one call. An append carries a
stamp: one that was stored while its acknowledgement was lost is recognized when it is sent again, so each event is
stored once; one that arrives after it was given up is refused. So it is with the opening of a stream; a claim is known
by its nonce.

Nobody polls. One connection listens for all readers of this process (a doorbell: what it says is only that it is worth
while to read), one task looks after the lease, after readers whose doorbell was missed, and after the server: once that
has failed, operations fail at once until it answers again, so that live delivery never waits for it twice.

Deliberate differences from `MemoryStorage`: a session's last activity is known to half a second; a session of which the
owner is dead is dropped when it is idle, also where a request is unanswered.

The modules: `storage` is the contract; `calls` and `scripts` bring what it asks to the server, `answers` says what that
means as values; `doorbell` and `listener` wake who waits; `pulse` is what is done when nobody asks. `lua/` holds the
scripts; `common.lua` says which keys there are.
"""

try:
    from mcp_resumable.redis.calls import RedisUnavailableError
    from mcp_resumable.redis.storage import RedisStorage
except ImportError as exc:
    raise ImportError("mcp_resumable.redis needs redis-py: pip install 'mcp_resumable[redis]'") from exc

__all__ = ["RedisStorage", "RedisUnavailableError"]
