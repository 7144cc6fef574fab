-- The ledger's schema, version 1, for SQLite. Later changes are numbered files in migrations/sqlite.
-- Instants are microseconds, sizes are bytes, states are the words of the glossary.
-- Pages are 1 KiB (see engines/sqlite): a verb touches many small rows, and each touched page is written
-- whole. Tables whose rows are longer than a quarter of a page keep their rowid, because their rows would
-- otherwise spill into overflow pages.

-- the pool --------------------------------------------------------------------------------------------------

CREATE TABLE meta (
    key TEXT PRIMARY KEY,
    value TEXT NOT NULL
) STRICT, WITHOUT ROWID;

-- The identity by which replicas know this ledger. It stays the same after a restore.
INSERT INTO meta VALUES ('ledger_id', lower(hex(randomblob(16))));
INSERT INTO meta VALUES ('heads_current', 'yes');

-- One row. Every verb that changes who holds what locks it first, so grants and returns queue up here.
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
    cooldown_until INTEGER NOT NULL,
    -- GPU time per day (core.billing.allowance): what is left of it as of an instant. 0 per day: no quota.
    gpu_us_per_day INTEGER NOT NULL DEFAULT 0 CHECK (gpu_us_per_day >= 0),
    left_us INTEGER NOT NULL DEFAULT 0 CHECK (left_us <= gpu_us_per_day OR gpu_us_per_day = 0),
    left_at INTEGER NOT NULL DEFAULT 0,
    max_sessions INTEGER NOT NULL DEFAULT 0 CHECK (max_sessions >= 0),
    max_storage_bytes INTEGER NOT NULL DEFAULT 0 CHECK (max_storage_bytes >= 0)
) STRICT, WITHOUT ROWID;

-- Names of tenants that were removed. What they had is kept under the name, so nobody else gets it.
CREATE TABLE former_tenant (
    name TEXT PRIMARY KEY,
    removed_at INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

CREATE TABLE host (
    name TEXT PRIMARY KEY,
    seen_at INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

-- Every grant and return updates the sums (free_bytes, leases, ...), so that a grant never reads other
-- leases.
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
CREATE INDEX device_by_free_bytes ON device (free_bytes);

-- What a GPU-hour costs from a moment on, in millionths; -1: no longer on the list. Rows are only added.
CREATE TABLE price (
    device_class TEXT NOT NULL,
    tier TEXT NOT NULL,
    valid_from INTEGER NOT NULL,
    micro_per_gpu_hour INTEGER NOT NULL CHECK (micro_per_gpu_hour >= -1),
    PRIMARY KEY (device_class, tier, valid_from)
) STRICT, WITHOUT ROWID;

-- leases ----------------------------------------------------------------------------------------------------

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
    strand_anchor TEXT NOT NULL,
    spread TEXT NOT NULL DEFAULT 'no',
    seats INTEGER NOT NULL DEFAULT 0  -- how many hosts a gang has; 0: one host
) STRICT;
-- expires_at has no index on purpose: a renewal must stay cheap.
CREATE INDEX lease_live ON lease (host) WHERE settled_at = 0;
CREATE INDEX lease_waiting ON lease (joined_at) WHERE state = 'waiting';
CREATE INDEX lease_preempted ON lease (tenant, job, ended_at) WHERE reason = 'preempted';

-- Live slices only: who is on a device now. There is no index by lease, because the lease row names its
-- devices.
CREATE TABLE slice (
    device_id TEXT NOT NULL,
    lease_id TEXT NOT NULL,
    tenant TEXT NOT NULL,
    exclusivity TEXT NOT NULL,
    vram_bytes INTEGER NOT NULL CHECK (vram_bytes > 0),
    rate_ppm INTEGER NOT NULL,
    PRIMARY KEY (device_id, lease_id)
) STRICT, WITHOUT ROWID;

-- One host of a lease over several hosts. A lease on one host has no seat: its own row says it all.
CREATE TABLE seat (
    lease_id TEXT NOT NULL,
    host TEXT NOT NULL,
    rank INTEGER NOT NULL,
    slices TEXT NOT NULL,
    pid INTEGER NOT NULL,            -- 0: nobody has joined there
    pid_started INTEGER NOT NULL,
    address TEXT NOT NULL,
    settled_at INTEGER NOT NULL,
    PRIMARY KEY (lease_id, host)
) STRICT, WITHOUT ROWID;
CREATE INDEX seat_live ON seat (host) WHERE settled_at = 0;

-- Proof of teardown, one row for each lease that had something to tear down. A gang has a Receipt from each
-- of its hosts; for other leases `host` is empty.
CREATE TABLE receipt (
    lease_id TEXT NOT NULL,
    tenant TEXT NOT NULL,
    at INTEGER NOT NULL,
    devices TEXT NOT NULL,
    proven INTEGER NOT NULL,
    ladder TEXT NOT NULL,
    containment TEXT NOT NULL,
    pids TEXT NOT NULL,
    freed_bytes INTEGER NOT NULL,
    scrubbed_bytes INTEGER NOT NULL,
    duration_us INTEGER NOT NULL,
    detail TEXT NOT NULL,
    host TEXT NOT NULL DEFAULT '',
    PRIMARY KEY (lease_id, host)
) STRICT;
CREATE INDEX receipt_newest ON receipt (at);
-- Teardowns given up while their host was silent. The host's warden asks for them each time it looks.
CREATE INDEX receipt_given_up ON receipt (lease_id) WHERE ladder = 'unseen' AND proven = 0;

-- Block leases: who may write to which region of durable storage, and which checkpoint in it counts. Rows of
-- removed blocks stay.
CREATE TABLE block (
    id TEXT PRIMARY KEY,
    tenant TEXT NOT NULL,
    blocks INTEGER NOT NULL CHECK (blocks >= 2),
    ttl_us INTEGER NOT NULL,
    keep_us INTEGER NOT NULL CHECK (keep_us >= 0),
    host TEXT NOT NULL,
    pid INTEGER NOT NULL,
    pid_started INTEGER NOT NULL,
    secret_hash TEXT NOT NULL,
    secret_before TEXT NOT NULL,  -- hash of the last holder's secret: it is told that it was fenced
    state TEXT NOT NULL CHECK (state IN ('held', 'kept', 'gone')),
    epoch INTEGER NOT NULL CHECK (epoch > 0),
    created_at INTEGER NOT NULL,
    granted_at INTEGER NOT NULL,
    expires_at INTEGER NOT NULL,
    ended_at INTEGER NOT NULL,
    removed_at INTEGER NOT NULL,
    reason TEXT NOT NULL,
    detail TEXT NOT NULL,
    sequence INTEGER NOT NULL CHECK (sequence >= -1),  -- -1: unknown since a restore
    digest TEXT NOT NULL,
    bytes INTEGER NOT NULL,
    recorded_at INTEGER NOT NULL
) STRICT;
CREATE INDEX block_of_tenant ON block (tenant, state);

-- progress --------------------------------------------------------------------------------------------------

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
    strand_anchor TEXT NOT NULL,
    floor INTEGER NOT NULL DEFAULT 0,
    sweeps INTEGER NOT NULL DEFAULT 0,
    stored_bytes INTEGER NOT NULL DEFAULT 0 CHECK (stored_bytes >= 0)
) STRICT;
CREATE INDEX head_of_tenant ON head (tenant);

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

-- Versions of a job that outlive the chain behind its head: kept by retention (no tag) or tagged.
CREATE TABLE kept_version (
    job TEXT NOT NULL,
    version INTEGER NOT NULL CHECK (version > 0),
    tag TEXT NOT NULL,
    digest TEXT NOT NULL,
    step INTEGER NOT NULL,
    at INTEGER NOT NULL,
    PRIMARY KEY (job, version, tag)
) STRICT, WITHOUT ROWID;
CREATE UNIQUE INDEX kept_version_by_tag ON kept_version (job, tag) WHERE tag <> '';

-- What each version of a job is charged for (core.checkpoints). A tenant's charge is the sum over its heads.
CREATE TABLE stored_version (
    job TEXT NOT NULL,
    version INTEGER NOT NULL,
    charged_bytes INTEGER NOT NULL CHECK (charged_bytes >= 0),
    whole_bytes INTEGER NOT NULL,
    PRIMARY KEY (job, version)
) STRICT, WITHOUT ROWID;

-- queues ----------------------------------------------------------------------------------------------------

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

-- One process that uses one queue. Each counts for itself, so that no row is shared by all of them.
CREATE TABLE consumer (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    queue INTEGER NOT NULL,
    host TEXT NOT NULL,
    pid INTEGER NOT NULL,
    pid_started INTEGER NOT NULL,
    pid_space INTEGER NOT NULL,         -- the namespace the pid means something in
    opened_at INTEGER NOT NULL,
    batch INTEGER NOT NULL,          -- the last batch published
    batch_new INTEGER NOT NULL,      -- how many of it were new
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
CREATE INDEX consumer_by_queue ON consumer (queue);

-- An item's row is its effect too: its result and its being done are one fact. AUTOINCREMENT, because
-- results elsewhere are keyed by an item's number: a purged number must never return.
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

-- studio ----------------------------------------------------------------------------------------------------

-- What a tenant shows a service to be let in. Only the SHA-256 of the secret is stored; using a token writes
-- nothing.
CREATE TABLE token (
    id TEXT PRIMARY KEY,
    tenant TEXT NOT NULL,
    scope TEXT NOT NULL CHECK (scope IN ('user', 'operator')),
    digest TEXT NOT NULL CHECK (length(digest) = 64),
    note TEXT NOT NULL,
    created_at INTEGER NOT NULL,
    expires_at INTEGER NOT NULL,  -- 0: never
    revoked_at INTEGER NOT NULL   -- 0: not
) STRICT, WITHOUT ROWID;
CREATE INDEX token_of_tenant ON token (tenant, created_at);

-- A tenant's stay in the studio. Its state follows from this row and the row of its current lease
-- (core.studio).
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

-- Every lease a session had. What a session used is what these leases used.
CREATE TABLE session_lease (
    session_id TEXT NOT NULL,
    number INTEGER NOT NULL CHECK (number > 0),
    lease_id TEXT NOT NULL,
    bound_at INTEGER NOT NULL,
    PRIMARY KEY (session_id, number)
) STRICT, WITHOUT ROWID;
CREATE UNIQUE INDEX session_lease_once ON session_lease (lease_id);

-- journal ---------------------------------------------------------------------------------------------------

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

-- Refusals of the last minute, which are written one by one up to a number and then in one row.
CREATE TABLE refusal_tally (
    tenant TEXT NOT NULL,
    kind TEXT NOT NULL,
    code TEXT NOT NULL,
    since INTEGER NOT NULL,
    counted INTEGER NOT NULL,  -- that had a row each
    more INTEGER NOT NULL,     -- that had none
    PRIMARY KEY (tenant, kind, code)
) STRICT, WITHOUT ROWID;

-- Where each strand continues after rows were removed from its beginning. A row of the main strand carries
-- the digest of this table.
CREATE TABLE pruned (
    strand TEXT PRIMARY KEY,
    seq INTEGER NOT NULL CHECK (seq >= 0),
    hash TEXT NOT NULL
);

-- Leases whose journal rows are archived, with what they used, until a batch removes them.
CREATE TABLE leaving (
    lease_id TEXT PRIMARY KEY,
    upto INTEGER NOT NULL,   -- the last journal row archived with it
    used TEXT NOT NULL
);

-- Commits whose journal rows are archived while their lease remains: a report cuts held time at them.
CREATE TABLE pruned_commit (
    lease_id TEXT NOT NULL,
    job TEXT NOT NULL,
    at INTEGER NOT NULL,
    steps INTEGER NOT NULL,
    compute_us INTEGER NOT NULL
);
CREATE INDEX pruned_commit_of_lease ON pruned_commit (lease_id);

-- What removed leases used, by the day (UTC) it counts on. Times are GPU time.
CREATE TABLE used_day (
    day INTEGER NOT NULL,
    tenant TEXT NOT NULL,
    job TEXT NOT NULL,
    tier TEXT NOT NULL,
    used TEXT NOT NULL,
    PRIMARY KEY (day, tenant, job, tier)
);
