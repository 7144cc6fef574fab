-- Queues. An item's row is its effect too: its result and its being done are one fact.
CREATE TABLE queue (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    tenant TEXT NOT NULL,
    name TEXT NOT NULL,
    paused INTEGER NOT NULL,
    visibility_us INTEGER NOT NULL,
    tries INTEGER NOT NULL,
    losses INTEGER NOT NULL,
    backoff_us INTEGER NOT NULL,
    concurrency INTEGER NOT NULL,
    created_at INTEGER NOT NULL,
    purged INTEGER NOT NULL,
    UNIQUE (tenant, name)
) STRICT;

-- One process at one queue. The counts are kept here, each by its own clerk, so that no row is everybody's.
CREATE TABLE clerk (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    queue INTEGER NOT NULL,
    host TEXT NOT NULL,
    pid INTEGER NOT NULL,
    pid_started INTEGER NOT NULL,
    pid_space INTEGER NOT NULL,         -- the namespace the pid means something in
    opened_at INTEGER NOT NULL,
    batch INTEGER NOT NULL,          -- the last one published
    batch_new INTEGER NOT NULL,      -- and how many of it were new
    published INTEGER NOT NULL,
    completed INTEGER NOT NULL,
    failed INTEGER NOT NULL,
    stale INTEGER NOT NULL,
    work_us INTEGER NOT NULL,
    tempo_slot INTEGER NOT NULL,
    tempo_count INTEGER NOT NULL,
    tempo_before INTEGER NOT NULL,
    strand_seq INTEGER NOT NULL,
    strand_hash TEXT NOT NULL,
    strand_anchor TEXT NOT NULL
) STRICT;
CREATE INDEX clerk_by_queue ON clerk (queue);

-- AUTOINCREMENT: a purged item's number must never be another one's, because results elsewhere are keyed by it.
CREATE TABLE item (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    queue INTEGER NOT NULL,
    key TEXT,
    state TEXT NOT NULL,
    priority INTEGER NOT NULL,
    visible_at INTEGER NOT NULL,
    place INTEGER NOT NULL,
    delivery INTEGER NOT NULL,
    failures INTEGER NOT NULL,
    losses INTEGER NOT NULL,
    owner INTEGER NOT NULL,
    published_at INTEGER NOT NULL,
    done_at INTEGER NOT NULL,
    work_us INTEGER NOT NULL,
    body TEXT NOT NULL,
    result TEXT NOT NULL,
    error TEXT NOT NULL
) STRICT;
CREATE UNIQUE INDEX item_by_key ON item (queue, key) WHERE key IS NOT NULL;
CREATE INDEX item_ready ON item (queue, priority DESC, place, id) WHERE state = 'ready';
CREATE INDEX item_hidden ON item (queue, visible_at) WHERE state IN ('delayed', 'leased');
CREATE INDEX item_done ON item (queue, id) WHERE state = 'done';
CREATE INDEX item_dead ON item (queue, id) WHERE state = 'dead';
