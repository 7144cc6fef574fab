-- Pages are 1 KiB (see sqlite.py): a verb touches many small rows, and each touched page is written whole. Tables whose rows
-- are longer than a quarter of that keep their rowid, because the others would spill into overflow pages.
-- Instants are microseconds, sizes are bytes, states are the words of the glossary.

CREATE TABLE meta (
    key TEXT PRIMARY KEY,
    value TEXT NOT NULL
) STRICT, WITHOUT ROWID;

-- One row. Every verb that changes who holds what locks it first: grant and return are one queue.
CREATE TABLE pool (
    id INTEGER PRIMARY KEY CHECK (id = 1),
    epoch INTEGER NOT NULL,          -- the last one granted
    clock_us INTEGER NOT NULL,       -- no later verb sees an earlier time
    boot_id TEXT NOT NULL,
    boot_offset_us INTEGER NOT NULL,
    waiting INTEGER NOT NULL CHECK (waiting >= 0),
    journal_seq INTEGER NOT NULL,
    journal_hash TEXT NOT NULL,
    policy TEXT NOT NULL
) STRICT;

CREATE TABLE tenant (
    name TEXT PRIMARY KEY,
    weight INTEGER NOT NULL CHECK (weight > 0),
    max_leases INTEGER NOT NULL,
    max_vram_bytes INTEGER NOT NULL,
    max_waiting INTEGER NOT NULL,
    live_leases INTEGER NOT NULL CHECK (live_leases >= 0),
    live_bytes INTEGER NOT NULL CHECK (live_bytes >= 0),
    waiting INTEGER NOT NULL CHECK (waiting >= 0),
    used_us INTEGER NOT NULL,
    rate_ppm INTEGER NOT NULL CHECK (rate_ppm >= 0),
    as_of INTEGER NOT NULL,
    cooldown_until INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

CREATE TABLE host (
    name TEXT PRIMARY KEY,
    seen_at INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

-- The sums (free_bytes, leases, ...) are kept by every grant and return, so that a grant never reads other leases.
CREATE TABLE device (
    id TEXT PRIMARY KEY,
    host TEXT NOT NULL,
    driver TEXT NOT NULL,
    ordinal INTEGER NOT NULL,
    name TEXT NOT NULL,
    capacity_bytes INTEGER NOT NULL CHECK (capacity_bytes > 0),
    free_bytes INTEGER NOT NULL CHECK (free_bytes BETWEEN 0 AND capacity_bytes),
    state TEXT NOT NULL,
    leases INTEGER NOT NULL CHECK (leases >= 0),
    session_leases INTEGER NOT NULL CHECK (session_leases >= 0),
    device_leases INTEGER NOT NULL CHECK (device_leases BETWEEN 0 AND 1),
    sole_tenant TEXT NOT NULL,
    note TEXT NOT NULL,
    CHECK (device_leases = 0 OR leases = 1)
) STRICT, WITHOUT ROWID;
-- Without free_bytes on purpose: a host has few devices, and a grant must not rewrite this index.
CREATE INDEX device_by_host ON device (host);
CREATE INDEX device_by_room ON device (free_bytes);

CREATE TABLE lease (
    id TEXT PRIMARY KEY,
    tenant TEXT NOT NULL,
    job TEXT NOT NULL,
    tier TEXT NOT NULL,
    exclusivity TEXT NOT NULL,
    asked_bytes INTEGER NOT NULL,
    least_bytes INTEGER NOT NULL,
    wants_offers INTEGER NOT NULL,
    device_count INTEGER NOT NULL,
    ttl_us INTEGER NOT NULL,
    wait_us INTEGER,
    only_host TEXT NOT NULL,
    hold_cap_us INTEGER NOT NULL,
    host TEXT NOT NULL,
    pid INTEGER NOT NULL,
    pid_started INTEGER NOT NULL,
    secret_hash TEXT NOT NULL,
    state TEXT NOT NULL,
    epoch INTEGER NOT NULL,
    vram_bytes INTEGER NOT NULL,
    slices TEXT NOT NULL,
    joined_at INTEGER NOT NULL,
    granted_at INTEGER NOT NULL,
    expires_at INTEGER NOT NULL,
    deadline_at INTEGER NOT NULL,
    ended_at INTEGER NOT NULL,
    settled_at INTEGER NOT NULL,
    reason TEXT NOT NULL,
    detail TEXT NOT NULL,
    busy INTEGER NOT NULL,
    active_at INTEGER NOT NULL,
    committed_at INTEGER NOT NULL,
    preemptions INTEGER NOT NULL,
    claimed INTEGER NOT NULL,
    seen_at INTEGER NOT NULL,
    wait_until INTEGER NOT NULL,
    offer_until INTEGER NOT NULL,
    strand_seq INTEGER NOT NULL,
    strand_hash TEXT NOT NULL,
    strand_anchor TEXT NOT NULL
) STRICT;
-- expires_at has no index on purpose: a renewal must stay cheap.
CREATE INDEX lease_live ON lease (host) WHERE settled_at = 0;
CREATE INDEX lease_waiting ON lease (joined_at) WHERE state = 'waiting';
CREATE INDEX lease_preempted ON lease (tenant, job, ended_at) WHERE reason = 'preempted';

-- Live slices only: who sits on a device now.
CREATE TABLE slice (
    device_id TEXT NOT NULL,
    lease_id TEXT NOT NULL,
    tenant TEXT NOT NULL,
    exclusivity TEXT NOT NULL,
    vram_bytes INTEGER NOT NULL CHECK (vram_bytes > 0),
    rate_ppm INTEGER NOT NULL,
    PRIMARY KEY (device_id, lease_id)
) STRICT, WITHOUT ROWID;
-- No index by lease: the lease row names its devices.

CREATE TABLE head (
    job TEXT PRIMARY KEY,
    tenant TEXT NOT NULL,
    version INTEGER NOT NULL,
    step INTEGER NOT NULL,
    digest TEXT NOT NULL,
    cursor_text TEXT NOT NULL,
    epoch INTEGER NOT NULL,
    committed_at INTEGER NOT NULL,
    strand_seq INTEGER NOT NULL,
    strand_hash TEXT NOT NULL,
    strand_anchor TEXT NOT NULL
) STRICT;

CREATE TABLE effect (
    key TEXT PRIMARY KEY,
    fingerprint TEXT NOT NULL,
    job TEXT NOT NULL,
    owner TEXT NOT NULL,
    epoch INTEGER NOT NULL,
    completed INTEGER NOT NULL,
    outcome TEXT NOT NULL,
    version INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

CREATE TABLE journal (
    id INTEGER PRIMARY KEY,
    strand TEXT NOT NULL,
    seq INTEGER NOT NULL,
    at INTEGER NOT NULL,
    kind TEXT NOT NULL,
    tenant TEXT NOT NULL,
    subject TEXT NOT NULL,
    body TEXT NOT NULL,
    hash TEXT NOT NULL
) STRICT;
