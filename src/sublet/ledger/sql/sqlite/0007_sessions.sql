-- A tenant's stay in the studio. What it is now follows from this row and the one of its current lease (core.session).
CREATE TABLE studio_session (
    id TEXT PRIMARY KEY,
    tenant TEXT NOT NULL,
    name TEXT NOT NULL,
    host TEXT NOT NULL,
    checkpoint TEXT NOT NULL,
    warm_us INTEGER NOT NULL,
    asked_bytes INTEGER NOT NULL,
    least_bytes INTEGER NOT NULL,
    wants_offers INTEGER NOT NULL,
    device_count INTEGER NOT NULL,
    ttl_us INTEGER NOT NULL,
    exclusivity TEXT NOT NULL,
    tier TEXT NOT NULL,
    wait_us INTEGER,
    hold_cap_us INTEGER,
    only_host TEXT NOT NULL,
    job TEXT NOT NULL,
    lease_id TEXT NOT NULL,
    leases INTEGER NOT NULL CHECK (leases BETWEEN 0 AND wanted),
    wanted INTEGER NOT NULL,
    answer TEXT NOT NULL CHECK (answer IN ('', 'accept', 'decline')),
    opened_at INTEGER NOT NULL,
    active_at INTEGER NOT NULL,
    ended_at INTEGER NOT NULL,       -- 0: it is open
    detail TEXT NOT NULL,
    calls INTEGER NOT NULL,
    errors INTEGER NOT NULL,
    launches INTEGER NOT NULL,
    checkpoint_bytes INTEGER NOT NULL,
    version INTEGER NOT NULL
) STRICT;
CREATE INDEX session_open ON studio_session (tenant) WHERE ended_at = 0;
CREATE INDEX session_here ON studio_session (host) WHERE ended_at = 0;
CREATE INDEX session_of_tenant ON studio_session (tenant, opened_at);
CREATE INDEX session_by_lease ON studio_session (lease_id);

-- Every lease a session had: what it used is what they used.
CREATE TABLE session_lease (
    session_id TEXT NOT NULL,
    number INTEGER NOT NULL CHECK (number > 0),
    lease_id TEXT NOT NULL,
    bound_at INTEGER NOT NULL,
    PRIMARY KEY (session_id, number)
) STRICT, WITHOUT ROWID;
CREATE UNIQUE INDEX session_lease_once ON session_lease (lease_id);

ALTER TABLE tenant ADD COLUMN max_sessions INTEGER NOT NULL DEFAULT 0 CHECK (max_sessions >= 0);
ALTER TABLE tenant ADD COLUMN max_storage_bytes INTEGER NOT NULL DEFAULT 0 CHECK (max_storage_bytes >= 0);

-- What each version of a job is charged with (core.storage). A tenant's charge is the sum of its heads'.
CREATE TABLE stored_version (
    job TEXT NOT NULL,
    version INTEGER NOT NULL,
    charged_bytes INTEGER NOT NULL CHECK (charged_bytes >= 0),
    whole_bytes INTEGER NOT NULL,
    PRIMARY KEY (job, version)
) STRICT, WITHOUT ROWID;
ALTER TABLE head ADD COLUMN stored_bytes INTEGER NOT NULL DEFAULT 0 CHECK (stored_bytes >= 0);
CREATE INDEX head_of_tenant ON head (tenant);

-- What a GPU-hour costs from a moment on, in millionths; -1: no longer on the list. Rows are only added.
CREATE TABLE price (
    device_class TEXT NOT NULL,
    tier TEXT NOT NULL,
    valid_from INTEGER NOT NULL,
    micro_per_gpu_hour INTEGER NOT NULL CHECK (micro_per_gpu_hour >= -1),
    PRIMARY KEY (device_class, tier, valid_from)
) STRICT, WITHOUT ROWID;
