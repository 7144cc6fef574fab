-- Instants are microseconds, sizes are bytes, states are the words of the glossary.

CREATE TABLE meta (
    key TEXT PRIMARY KEY,
    value TEXT NOT NULL
);

-- One row. Every verb that changes who holds what locks it first: grant and return are one queue.
CREATE TABLE pool (
    id BIGINT PRIMARY KEY CHECK (id = 1),
    epoch BIGINT NOT NULL,          -- the last one granted
    clock_us BIGINT NOT NULL,       -- no later verb sees an earlier time
    boot_id TEXT NOT NULL,
    boot_offset_us BIGINT NOT NULL,
    waiting BIGINT NOT NULL CHECK (waiting >= 0),
    journal_seq BIGINT NOT NULL,
    journal_hash TEXT NOT NULL,
    policy TEXT NOT NULL
) WITH (fillfactor = 50);

CREATE TABLE tenant (
    name TEXT PRIMARY KEY,
    weight BIGINT NOT NULL CHECK (weight > 0),
    max_leases BIGINT NOT NULL,
    max_vram_bytes BIGINT NOT NULL,
    max_waiting BIGINT NOT NULL,
    live_leases BIGINT NOT NULL CHECK (live_leases >= 0),
    live_bytes BIGINT NOT NULL CHECK (live_bytes >= 0),
    waiting BIGINT NOT NULL CHECK (waiting >= 0),
    used_us BIGINT NOT NULL,
    rate_ppm BIGINT NOT NULL CHECK (rate_ppm >= 0),
    as_of BIGINT NOT NULL,
    cooldown_until BIGINT NOT NULL
) WITH (fillfactor = 50);

CREATE TABLE host (
    name TEXT PRIMARY KEY,
    seen_at BIGINT NOT NULL
) WITH (fillfactor = 50);

-- The sums (free_bytes, leases, ...) are kept by every grant and return, so that a grant never reads other leases.
CREATE TABLE device (
    id TEXT PRIMARY KEY,
    host TEXT NOT NULL,
    driver TEXT NOT NULL,
    ordinal BIGINT NOT NULL,
    name TEXT NOT NULL,
    capacity_bytes BIGINT NOT NULL CHECK (capacity_bytes > 0),
    free_bytes BIGINT NOT NULL CHECK (free_bytes BETWEEN 0 AND capacity_bytes),
    state TEXT NOT NULL,
    leases BIGINT NOT NULL CHECK (leases >= 0),
    session_leases BIGINT NOT NULL CHECK (session_leases >= 0),
    device_leases BIGINT NOT NULL CHECK (device_leases BETWEEN 0 AND 1),
    sole_tenant TEXT NOT NULL,
    note TEXT NOT NULL,
    CHECK (device_leases = 0 OR leases = 1)
) WITH (fillfactor = 50);
CREATE INDEX device_by_host ON device (host, free_bytes);
CREATE INDEX device_by_room ON device (free_bytes);

CREATE TABLE lease (
    id TEXT PRIMARY KEY,
    tenant TEXT NOT NULL,
    job TEXT NOT NULL,
    tier TEXT NOT NULL,
    exclusivity TEXT NOT NULL,
    asked_bytes BIGINT NOT NULL,
    least_bytes BIGINT NOT NULL,
    wants_offers BIGINT NOT NULL,
    device_count BIGINT NOT NULL,
    ttl_us BIGINT NOT NULL,
    wait_us BIGINT,
    only_host TEXT NOT NULL,
    hold_cap_us BIGINT NOT NULL,
    host TEXT NOT NULL,
    pid BIGINT NOT NULL,
    pid_started BIGINT NOT NULL,
    secret_hash TEXT NOT NULL,
    state TEXT NOT NULL,
    epoch BIGINT NOT NULL,
    vram_bytes BIGINT NOT NULL,
    slices TEXT NOT NULL,
    joined_at BIGINT NOT NULL,
    granted_at BIGINT NOT NULL,
    expires_at BIGINT NOT NULL,
    deadline_at BIGINT NOT NULL,
    ended_at BIGINT NOT NULL,
    settled_at BIGINT NOT NULL,
    reason TEXT NOT NULL,
    detail TEXT NOT NULL,
    busy BIGINT NOT NULL,
    active_at BIGINT NOT NULL,
    committed_at BIGINT NOT NULL,
    preemptions BIGINT NOT NULL,
    claimed BIGINT NOT NULL,
    seen_at BIGINT NOT NULL,
    wait_until BIGINT NOT NULL,
    offer_until BIGINT NOT NULL,
    strand_seq BIGINT NOT NULL,
    strand_hash TEXT NOT NULL,
    strand_anchor TEXT NOT NULL
) WITH (fillfactor = 50);
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
    vram_bytes BIGINT NOT NULL CHECK (vram_bytes > 0),
    rate_ppm BIGINT NOT NULL,
    PRIMARY KEY (device_id, lease_id)
);
CREATE INDEX slice_by_lease ON slice (lease_id);

CREATE TABLE head (
    job TEXT PRIMARY KEY,
    tenant TEXT NOT NULL,
    version BIGINT NOT NULL,
    step BIGINT NOT NULL,
    digest TEXT NOT NULL,
    cursor_text TEXT NOT NULL,
    epoch BIGINT NOT NULL,
    committed_at BIGINT NOT NULL,
    strand_seq BIGINT NOT NULL,
    strand_hash TEXT NOT NULL,
    strand_anchor TEXT NOT NULL
) WITH (fillfactor = 50);

CREATE TABLE effect (
    key TEXT PRIMARY KEY,
    fingerprint TEXT NOT NULL,
    job TEXT NOT NULL,
    owner TEXT NOT NULL,
    epoch BIGINT NOT NULL,
    completed BIGINT NOT NULL,
    outcome TEXT NOT NULL,
    version BIGINT NOT NULL
) WITH (fillfactor = 50);

-- One closed interval per lease.
CREATE TABLE usage (
    lease_id TEXT PRIMARY KEY,
    tenant TEXT NOT NULL,
    tier TEXT NOT NULL,
    job TEXT NOT NULL,
    from_at BIGINT NOT NULL,
    to_at BIGINT NOT NULL CHECK (to_at >= from_at),
    gpu_us BIGINT NOT NULL CHECK (gpu_us >= 0),
    vram_byte_s BIGINT NOT NULL CHECK (vram_byte_s >= 0),
    reason TEXT NOT NULL
);
CREATE INDEX usage_by_tenant ON usage (tenant, to_at);

CREATE TABLE journal (
    id BIGINT GENERATED BY DEFAULT AS IDENTITY PRIMARY KEY,
    strand TEXT NOT NULL,
    seq BIGINT NOT NULL,
    at BIGINT NOT NULL,
    kind TEXT NOT NULL,
    tenant TEXT NOT NULL,
    subject TEXT NOT NULL,
    body TEXT NOT NULL,
    hash TEXT NOT NULL
);
