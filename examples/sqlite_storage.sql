-- The schema of `sqlite_storage.py`. What must always hold is seen to here, whoever writes: a stream's marks follow its
-- events, what is charged follows the streams, nothing of a session outlives its generation, and what is too old goes.

-- SQLite 3.32 or newer, with JSON. A tail that reads waits for no writer. A commit outlives the process, however that
-- ends; a power failure only with `synchronous = FULL`, which costs an fsync each.
PRAGMA journal_mode = WAL;
PRAGMA synchronous = NORMAL;
PRAGMA foreign_keys = ON;

BEGIN IMMEDIATE;

-- One row: the time of the last transaction, the charge of all streams, and what `Retention` allows.
CREATE TABLE IF NOT EXISTS store (
    id INTEGER PRIMARY KEY CHECK (id = 1),
    now REAL NOT NULL DEFAULT 0,
    charge INTEGER NOT NULL DEFAULT 0,
    max_events INTEGER,
    max_bytes INTEGER,
    max_session_bytes INTEGER,
    max_total_bytes INTEGER,
    max_sessions INTEGER,
    completed_seconds REAL,
    idle_seconds REAL
);
INSERT OR IGNORE INTO store (id) VALUES (1);

-- One that is over stays for a while: the numbers of its generations (`issued`, as they are spelled) stay used.
CREATE TABLE IF NOT EXISTS sessions (
    session_id TEXT PRIMARY KEY,
    counter INTEGER NOT NULL DEFAULT 0,
    nonce TEXT NOT NULL DEFAULT '',
    issued TEXT NOT NULL DEFAULT ' ',
    opened_streams INTEGER NOT NULL DEFAULT 0,
    active_at REAL NOT NULL DEFAULT 0,
    over_at REAL
);
CREATE INDEX IF NOT EXISTS sessions_by_age ON sessions (over_at, active_at);

-- Those of the current generation that are neither superseded nor dropped. `name` is the id as it is spelled on the
-- wire; `request_id` is JSON, since it need not be valid Unicode, and null for the standalone stream.
CREATE TABLE IF NOT EXISTS streams (
    stream INTEGER PRIMARY KEY,
    session_id TEXT NOT NULL,
    ordinal INTEGER NOT NULL,
    name TEXT NOT NULL,
    request_id TEXT NOT NULL,
    origin_counter INTEGER NOT NULL,
    origin_ordinal INTEGER NOT NULL,
    answered_at REAL,
    high_water_mark INTEGER NOT NULL DEFAULT 0,
    replay_floor INTEGER NOT NULL DEFAULT 0,
    last_hole INTEGER NOT NULL DEFAULT 0,
    retained_bytes INTEGER NOT NULL DEFAULT 0,
    charge INTEGER AS (
        1024 + length(request_id) + retained_bytes + 72 * (high_water_mark - replay_floor)
    ),
    UNIQUE (session_id, name)
);
CREATE INDEX IF NOT EXISTS streams_by_request ON streams (session_id, request_id);
CREATE INDEX IF NOT EXISTS streams_by_age ON streams (answered_at) WHERE answered_at IS NOT NULL;

-- NULL is a hole. `place` ascends over all streams, in the order of appending.
CREATE TABLE IF NOT EXISTS events (
    place INTEGER PRIMARY KEY,
    session_id TEXT NOT NULL,
    stream INTEGER NOT NULL REFERENCES streams ON DELETE CASCADE,
    seq INTEGER NOT NULL,
    event BLOB,
    UNIQUE (stream, seq)
);
CREATE INDEX IF NOT EXISTS events_by_session ON events (session_id);

-- The event to evict next after an append: the oldest of its stream, its session or the store, where that holds too
-- much; none where that is the event that was appended last.
CREATE VIEW IF NOT EXISTS surplus AS
WITH
newest AS (SELECT place, stream, session_id FROM events ORDER BY place DESC LIMIT 1),
oldest AS (
    SELECT 1 AS turn, (SELECT place FROM events WHERE events.stream = newest.stream ORDER BY seq LIMIT 1) AS place
    FROM newest JOIN streams USING (stream) JOIN store
    WHERE retained_bytes > max_bytes OR high_water_mark - replay_floor > max_events
    UNION ALL
    SELECT 2, (SELECT place FROM events WHERE events.session_id = newest.session_id ORDER BY place LIMIT 1)
    FROM newest JOIN store
    WHERE (SELECT sum(charge) FROM streams WHERE streams.session_id = newest.session_id) > max_session_bytes
    UNION ALL
    SELECT 3, (SELECT place FROM events ORDER BY place LIMIT 1) FROM store WHERE charge > max_total_bytes
)
SELECT oldest.place FROM oldest JOIN newest WHERE oldest.place < newest.place ORDER BY turn LIMIT 1;

-- Streams as `StreamDescription` has them, in JSON.
CREATE VIEW IF NOT EXISTS descriptions AS
SELECT session_id, ordinal, json_object(
    'stream', name,
    'request_id', json(request_id),
    'replay_floor', replay_floor,
    'high_water_mark', high_water_mark,
    'is_terminal', json(iif(answered_at IS NULL, 'false', 'true')),
    'retained_events', (SELECT count(event) FROM events WHERE events.stream = streams.stream),
    'retained_bytes', retained_bytes
) AS description
FROM streams;

CREATE TRIGGER IF NOT EXISTS event_appended AFTER INSERT ON events BEGIN
    UPDATE streams SET
        high_water_mark = NEW.seq,
        last_hole = max(last_hole, NEW.seq * (NEW.event IS NULL)),
        retained_bytes = retained_bytes + ifnull(length(NEW.event), 0)
    WHERE stream = NEW.stream;
END;

CREATE TRIGGER IF NOT EXISTS event_evicted AFTER DELETE ON events BEGIN
    UPDATE streams SET replay_floor = OLD.seq, retained_bytes = retained_bytes - ifnull(length(OLD.event), 0)
    WHERE stream = OLD.stream;
    DELETE FROM streams WHERE stream = OLD.stream AND answered_at IS NOT NULL AND replay_floor = high_water_mark;
END;

CREATE TRIGGER IF NOT EXISTS stream_superseded BEFORE INSERT ON streams BEGIN
    DELETE FROM streams WHERE session_id = NEW.session_id AND request_id = NEW.request_id;
END;

CREATE TRIGGER IF NOT EXISTS stream_opened AFTER INSERT ON streams BEGIN
    UPDATE store SET charge = charge + NEW.charge;
    UPDATE sessions SET opened_streams = NEW.ordinal + 1 WHERE session_id = NEW.session_id;
END;

CREATE TRIGGER IF NOT EXISTS stream_changed AFTER UPDATE ON streams BEGIN
    UPDATE store SET charge = charge + NEW.charge - OLD.charge;
END;

CREATE TRIGGER IF NOT EXISTS stream_dropped AFTER DELETE ON streams BEGIN
    UPDATE store SET charge = charge - OLD.charge;
END;

CREATE TRIGGER IF NOT EXISTS generation_claimed AFTER UPDATE OF counter ON sessions BEGIN
    -- 16,000 characters: the last 1,000 generations or so.
    UPDATE sessions SET
        issued = substr(issued || NEW.counter || '-' || NEW.nonce || ' ', -16000),
        active_at = (SELECT now FROM store),
        over_at = NULL
    WHERE session_id = NEW.session_id;
    DELETE FROM streams WHERE session_id = NEW.session_id;
    INSERT INTO streams (session_id, ordinal, name, request_id, origin_counter, origin_ordinal)
    VALUES (NEW.session_id, 0, '0', 'null', NEW.counter, 0);
    -- The least recently active make room.
    UPDATE sessions SET over_at = (SELECT now FROM store) WHERE session_id IN (
        SELECT session_id FROM sessions WHERE over_at IS NULL AND session_id <> NEW.session_id ORDER BY active_at
        LIMIT (SELECT max(0, count(*) - (SELECT max_sessions FROM store)) FROM sessions WHERE over_at IS NULL)
    );
END;

CREATE TRIGGER IF NOT EXISTS session_ended AFTER UPDATE OF over_at ON sessions WHEN NEW.over_at IS NOT NULL BEGIN
    DELETE FROM streams WHERE session_id = NEW.session_id;
END;

CREATE TRIGGER IF NOT EXISTS time_passed AFTER UPDATE OF now ON store BEGIN
    DELETE FROM streams WHERE answered_at <= NEW.now - NEW.completed_seconds;
    -- A call that says nothing for long does not make its session idle.
    UPDATE sessions SET over_at = NEW.now
    WHERE over_at IS NULL AND active_at <= NEW.now - NEW.idle_seconds AND NOT EXISTS (
        SELECT * FROM streams
        WHERE streams.session_id = sessions.session_id AND request_id <> 'null' AND answered_at IS NULL
    );
    DELETE FROM sessions WHERE over_at <= NEW.now - NEW.idle_seconds;
END;

COMMIT;
