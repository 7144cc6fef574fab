-- The ledger's schema, version 1, for PostgreSQL. Later changes are numbered files in migrations/postgres.
-- Instants are microseconds, sizes are bytes, states are the words of the glossary.

-- the pool --------------------------------------------------------------------------------------------------

CREATE TABLE meta (
    key TEXT PRIMARY KEY,
    value TEXT NOT NULL
);

-- The identity by which replicas know this ledger. It stays the same after a restore.
INSERT INTO meta VALUES ('ledger_id', replace(gen_random_uuid()::text, '-', ''));
INSERT INTO meta VALUES ('heads_current', 'yes');

-- One row. Every verb that changes who holds what locks it first, so grants and returns queue up here.
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
    cooldown_until BIGINT NOT NULL,
    -- GPU time per day (core.billing.allowance): what is left of it as of an instant. 0 per day: no quota.
    gpu_us_per_day BIGINT NOT NULL DEFAULT 0 CHECK (gpu_us_per_day >= 0),
    left_us BIGINT NOT NULL DEFAULT 0 CHECK (left_us <= gpu_us_per_day OR gpu_us_per_day = 0),
    left_at BIGINT NOT NULL DEFAULT 0,
    max_sessions BIGINT NOT NULL DEFAULT 0 CHECK (max_sessions >= 0),
    max_storage_bytes BIGINT NOT NULL DEFAULT 0 CHECK (max_storage_bytes >= 0)
) WITH (fillfactor = 50);

-- Names of tenants that were removed. What they had is kept under the name, so nobody else gets it.
CREATE TABLE former_tenant (
    name TEXT PRIMARY KEY,
    removed_at BIGINT NOT NULL
);

CREATE TABLE host (
    name TEXT PRIMARY KEY,
    seen_at BIGINT NOT NULL
) WITH (fillfactor = 50);

-- Every grant and return updates the sums (free_bytes, leases, ...), so that a grant never reads other
-- leases.
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
-- Without free_bytes on purpose: a host has few devices, and a grant must not rewrite this index. With an
-- index on free_bytes no update of a device could be a HOT one, and dead row versions would pile up.
CREATE INDEX device_by_host ON device (host);

-- What a GPU-hour costs from a moment on, in millionths; -1: no longer on the list. Rows are only added.
CREATE TABLE price (
    device_class TEXT NOT NULL,
    tier TEXT NOT NULL,
    valid_from BIGINT NOT NULL,
    micro_per_gpu_hour BIGINT NOT NULL CHECK (micro_per_gpu_hour >= -1),
    PRIMARY KEY (device_class, tier, valid_from)
);

-- leases ----------------------------------------------------------------------------------------------------


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
    strand_anchor TEXT NOT NULL,
    spread TEXT NOT NULL DEFAULT 'no',
    seats BIGINT NOT NULL DEFAULT 0  -- how many hosts a gang has; 0: one host
) WITH (fillfactor = 50);
-- expires_at has no index on purpose: a renewal must stay cheap.
CREATE INDEX lease_live ON lease (host) WHERE settled_at = 0;
CREATE INDEX lease_waiting ON lease (joined_at) WHERE state = 'waiting';
CREATE INDEX lease_preempted ON lease (tenant, job, ended_at) WHERE reason = 'preempted';

-- Live slices only: who is on a device now.
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

-- One host of a lease over several hosts. A lease on one host has no seat: its own row says it all.
CREATE TABLE seat (
    lease_id text NOT NULL,
    host text NOT NULL,
    rank bigint NOT NULL,
    slices text NOT NULL,
    pid bigint NOT NULL,            -- 0: nobody has joined there
    pid_started bigint NOT NULL,
    address text NOT NULL,
    settled_at bigint NOT NULL,
    PRIMARY KEY (lease_id, host)
);
CREATE INDEX seat_live ON seat (host) WHERE settled_at = 0;

-- Proof of teardown, one row for each lease that had something to tear down. A gang has a Receipt from each
-- of its hosts; for other leases `host` is empty.
CREATE TABLE receipt (
    lease_id TEXT NOT NULL,
    tenant TEXT NOT NULL,
    at BIGINT NOT NULL,
    devices TEXT NOT NULL,
    proven INTEGER NOT NULL,
    ladder TEXT NOT NULL,
    containment TEXT NOT NULL,
    pids TEXT NOT NULL,
    freed_bytes BIGINT NOT NULL,
    scrubbed_bytes BIGINT NOT NULL,
    duration_us BIGINT NOT NULL,
    detail TEXT NOT NULL,
    host TEXT NOT NULL DEFAULT '',
    PRIMARY KEY (lease_id, host)
);
CREATE INDEX receipt_newest ON receipt (at);
-- Teardowns given up while their host was silent. The host's warden asks for them each time it looks.
CREATE INDEX receipt_given_up ON receipt (lease_id) WHERE ladder = 'unseen' AND proven = 0;

-- Block leases: who may write to which region of durable storage, and which checkpoint in it counts. Rows of
-- removed blocks stay.
CREATE TABLE block (
    id TEXT PRIMARY KEY,
    tenant TEXT NOT NULL,
    blocks BIGINT NOT NULL CHECK (blocks >= 2),
    ttl_us BIGINT NOT NULL,
    keep_us BIGINT NOT NULL CHECK (keep_us >= 0),
    host TEXT NOT NULL,
    pid BIGINT NOT NULL,
    pid_started BIGINT NOT NULL,
    secret_hash TEXT NOT NULL,
    secret_before TEXT NOT NULL,  -- hash of the last holder's secret: it is told that it was fenced
    state TEXT NOT NULL CHECK (state IN ('held', 'kept', 'gone')),
    epoch BIGINT NOT NULL CHECK (epoch > 0),
    created_at BIGINT NOT NULL,
    granted_at BIGINT NOT NULL,
    expires_at BIGINT NOT NULL,
    ended_at BIGINT NOT NULL,
    removed_at BIGINT NOT NULL,
    reason TEXT NOT NULL,
    detail TEXT NOT NULL,
    sequence BIGINT NOT NULL CHECK (sequence >= -1),  -- -1: unknown since a restore
    digest TEXT NOT NULL,
    bytes BIGINT NOT NULL,
    recorded_at BIGINT NOT NULL
) WITH (fillfactor = 50);
CREATE INDEX block_of_tenant ON block (tenant, state);

-- progress --------------------------------------------------------------------------------------------------

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
    strand_anchor TEXT NOT NULL,
    floor BIGINT NOT NULL DEFAULT 0,
    sweeps BIGINT NOT NULL DEFAULT 0,
    stored_bytes BIGINT NOT NULL DEFAULT 0 CHECK (stored_bytes >= 0)
) WITH (fillfactor = 50);
CREATE INDEX head_of_tenant ON head (tenant);

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

-- Versions of a job that outlive the chain behind its head: kept by retention (no tag) or tagged.
CREATE TABLE kept_version (
    job TEXT NOT NULL,
    version BIGINT NOT NULL CHECK (version > 0),
    tag TEXT NOT NULL,
    digest TEXT NOT NULL,
    step BIGINT NOT NULL,
    at BIGINT NOT NULL,
    PRIMARY KEY (job, version, tag)
);
CREATE UNIQUE INDEX kept_version_by_tag ON kept_version (job, tag) WHERE tag <> '';

-- What each version of a job is charged for (core.checkpoints). A tenant's charge is the sum over its heads.
CREATE TABLE stored_version (
    job TEXT NOT NULL,
    version BIGINT NOT NULL,
    charged_bytes BIGINT NOT NULL CHECK (charged_bytes >= 0),
    whole_bytes BIGINT NOT NULL,
    PRIMARY KEY (job, version)
);

-- queues ----------------------------------------------------------------------------------------------------

CREATE TABLE queue (
    id BIGINT GENERATED BY DEFAULT AS IDENTITY PRIMARY KEY,
    tenant TEXT NOT NULL,
    name TEXT NOT NULL,
    paused BIGINT NOT NULL,
    visibility_us BIGINT NOT NULL,
    tries BIGINT NOT NULL,
    losses BIGINT NOT NULL,
    backoff_us BIGINT NOT NULL,
    concurrency BIGINT NOT NULL,
    created_at BIGINT NOT NULL,
    purged BIGINT NOT NULL,
    UNIQUE (tenant, name)
);

-- One process that uses one queue. Each counts for itself, so that no row is shared by all of them.
CREATE TABLE consumer (
    id BIGINT GENERATED BY DEFAULT AS IDENTITY PRIMARY KEY,
    queue BIGINT NOT NULL,
    host TEXT NOT NULL,
    pid BIGINT NOT NULL,
    pid_started BIGINT NOT NULL,
    pid_space BIGINT NOT NULL,         -- the namespace the pid means something in
    opened_at BIGINT NOT NULL,
    batch BIGINT NOT NULL,          -- the last batch published
    batch_new BIGINT NOT NULL,      -- how many of it were new
    published BIGINT NOT NULL,
    completed BIGINT NOT NULL,
    failed BIGINT NOT NULL,
    stale BIGINT NOT NULL,
    work_us BIGINT NOT NULL,
    tempo_slot BIGINT NOT NULL,
    tempo_count BIGINT NOT NULL,
    tempo_before BIGINT NOT NULL,
    strand_seq BIGINT NOT NULL,
    strand_hash TEXT NOT NULL,
    strand_anchor TEXT NOT NULL
);
CREATE INDEX consumer_by_queue ON consumer (queue);

-- An item's row is its effect too: its result and its being done are one fact.
CREATE TABLE item (
    id BIGINT GENERATED BY DEFAULT AS IDENTITY PRIMARY KEY,
    queue BIGINT NOT NULL,
    key TEXT,
    state TEXT NOT NULL,
    priority BIGINT NOT NULL,
    visible_at BIGINT NOT NULL,
    place BIGINT NOT NULL,
    delivery BIGINT NOT NULL,
    failures BIGINT NOT NULL,
    losses BIGINT NOT NULL,
    owner BIGINT NOT NULL,
    published_at BIGINT NOT NULL,
    done_at BIGINT NOT NULL,
    work_us BIGINT NOT NULL,
    body TEXT NOT NULL,
    result TEXT NOT NULL,
    error TEXT NOT NULL
) WITH (autovacuum_vacuum_scale_factor = 0.02, autovacuum_analyze_scale_factor = 0.02);
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
    created_at BIGINT NOT NULL,
    expires_at BIGINT NOT NULL,  -- 0: never
    revoked_at BIGINT NOT NULL   -- 0: not
);
CREATE INDEX token_of_tenant ON token (tenant, created_at);

-- A tenant's stay in the studio. Its state follows from this row and the row of its current lease
-- (core.studio).
CREATE TABLE studio_session (
    id TEXT PRIMARY KEY,
    tenant TEXT NOT NULL,
    name TEXT NOT NULL,
    host TEXT NOT NULL,
    checkpoint TEXT NOT NULL,
    warm_us BIGINT NOT NULL,
    asked_bytes BIGINT NOT NULL,
    least_bytes BIGINT NOT NULL,
    wants_offers BIGINT NOT NULL,
    device_count BIGINT NOT NULL,
    ttl_us BIGINT NOT NULL,
    exclusivity TEXT NOT NULL,
    tier TEXT NOT NULL,
    wait_us BIGINT,
    hold_cap_us BIGINT,
    only_host TEXT NOT NULL,
    job TEXT NOT NULL,
    lease_id TEXT NOT NULL,
    leases BIGINT NOT NULL CHECK (leases BETWEEN 0 AND wanted),
    wanted BIGINT NOT NULL,
    answer TEXT NOT NULL CHECK (answer IN ('', 'accept', 'decline')),
    opened_at BIGINT NOT NULL,
    active_at BIGINT NOT NULL,
    ended_at BIGINT NOT NULL,       -- 0: it is open
    detail TEXT NOT NULL,
    calls BIGINT NOT NULL,
    errors BIGINT NOT NULL,
    launches BIGINT NOT NULL,
    checkpoint_bytes BIGINT NOT NULL,
    version BIGINT NOT NULL
);
CREATE INDEX session_open ON studio_session (tenant) WHERE ended_at = 0;
CREATE INDEX session_here ON studio_session (host) WHERE ended_at = 0;
CREATE INDEX session_of_tenant ON studio_session (tenant, opened_at);
CREATE INDEX session_by_lease ON studio_session (lease_id);

-- Every lease a session had. What a session used is what these leases used.
CREATE TABLE session_lease (
    session_id TEXT NOT NULL,
    number BIGINT NOT NULL CHECK (number > 0),
    lease_id TEXT NOT NULL,
    bound_at BIGINT NOT NULL,
    PRIMARY KEY (session_id, number)
);
CREATE UNIQUE INDEX session_lease_once ON session_lease (lease_id);

-- journal ---------------------------------------------------------------------------------------------------

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

-- Refusals of the last minute, which are written one by one up to a number and then in one row.
CREATE TABLE refusal_tally (
    tenant TEXT NOT NULL,
    kind TEXT NOT NULL,
    code TEXT NOT NULL,
    since BIGINT NOT NULL,
    counted BIGINT NOT NULL,  -- that had a row each
    more BIGINT NOT NULL,     -- that had none
    PRIMARY KEY (tenant, kind, code)
);

-- Where each strand continues after rows were removed from its beginning. A row of the main strand carries
-- the digest of this table.
CREATE TABLE pruned (
    strand TEXT PRIMARY KEY,
    seq BIGINT NOT NULL CHECK (seq >= 0),
    hash TEXT NOT NULL
);

-- Leases whose journal rows are archived, with what they used, until a batch removes them.
CREATE TABLE leaving (
    lease_id TEXT PRIMARY KEY,
    upto BIGINT NOT NULL,   -- the last journal row archived with it
    used TEXT NOT NULL
);

-- Commits whose journal rows are archived while their lease remains: a report cuts held time at them.
CREATE TABLE pruned_commit (
    lease_id TEXT NOT NULL,
    job TEXT NOT NULL,
    at BIGINT NOT NULL,
    steps BIGINT NOT NULL,
    compute_us BIGINT NOT NULL
);
CREATE INDEX pruned_commit_of_lease ON pruned_commit (lease_id);

-- What removed leases used, by the day (UTC) it counts on. Times are GPU time.
CREATE TABLE used_day (
    day BIGINT NOT NULL,
    tenant TEXT NOT NULL,
    job TEXT NOT NULL,
    tier TEXT NOT NULL,
    used TEXT NOT NULL,
    PRIMARY KEY (day, tenant, job, tier)
);

-- hot verbs of leases and steps -----------------------------------------------------------------------------
-- These do the plain success in one round trip and answer nothing otherwise; the caller then runs the same verb
-- through `core`, which also writes the refusal. A property test holds the two equal.
-- - Each locks its rows first and reads the clock in a later statement, because a time read in the statement
--   that waited for a lock is a time from before the wait.
-- - Each writes with one statement whose parts change different tables, because starting a statement costs the
--   server more than most of these do. Plans are made once (force_generic_plan), and of a wide row only the
--   columns in use are read.
-- - Those of leases answer nothing for a tenant with a daily GPU quota. The lease's row is locked before the
--   tenant is read: see `verbs.leasing.allowances.change`.

CREATE FUNCTION sublet_now() RETURNS bigint LANGUAGE sql VOLATILE AS $$
    -- The skew lets tests move the clock ahead.
    SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint
         + coalesce(nullif(current_setting('sublet.skew_us', true), '')::bigint, 0)
$$;

-- STABLE, because it calls what is only stable: declared so, it is inlined into the expressions that use it.
CREATE FUNCTION sublet_hash(previous text, strand text, seq bigint, at bigint, kind text, tenant text, subject text, body text)
RETURNS text LANGUAGE sql STABLE AS $$
    SELECT encode(sha256(convert_to(concat_ws(E'\n', previous, strand, seq, at, kind, tenant, subject, body), 'UTF8')), 'hex')
$$;

-- core.leasing.tenancy.used_now
CREATE FUNCTION sublet_used(t tenant, now_us bigint, half_life_us bigint) RETURNS bigint LANGUAGE plpgsql IMMUTABLE AS $$
DECLARE
    halving CONSTANT bigint[] := ARRAY[
        4294967296, 4248701965, 4202935003, 4157661043, 4112874773, 4068570940, 4024744348, 3981389855,
        3938502376, 3896076880, 3854108391, 3812591987, 3771522796, 3730896002, 3690706840, 3650950594,
        3611622603, 3572718252, 3534232978, 3496162267, 3458501653, 3421246719, 3384393094, 3347936457,
        3311872529, 3276197082, 3240905930, 3205994934, 3171459999, 3137297074, 3103502151, 3070071267,
        3037000500, 3004285971, 2971923842, 2939910317, 2908241642, 2876914102, 2845924021, 2815267765,
        2784941738, 2754942382, 2725266179, 2695909648, 2666869345, 2638141863, 2609723834, 2581611923,
        2553802834, 2526293303, 2499080105, 2472160047, 2445529972, 2419186755, 2393127307, 2367348571,
        2341847524, 2316621173, 2291666561, 2266980759, 2242560872, 2218404036, 2194507417, 2170868212,
        2147483648
    ];
    elapsed bigint := greatest(0, now_us - t.as_of);
    halvings bigint := elapsed / half_life_us;
    part numeric := (elapsed % half_life_us)::numeric * 64;
    i int := div(part, half_life_us)::int + 1;
    within numeric := mod(part, half_life_us);
    used bigint;
BEGIN
    IF t.used_us <= 0 OR elapsed = 0 THEN
        used := greatest(t.used_us, 0);
    ELSIF halvings >= 62 THEN
        used := 0;
    ELSE
        used := div((t.used_us >> halvings::int)::numeric * (halving[i] * (half_life_us - within) + halving[i + 1] * within),
                    half_life_us::numeric * 4294967296)::bigint;
    END IF;
    RETURN used + div(t.rate_ppm::numeric * elapsed, 1000000)::bigint;
END $$;

CREATE FUNCTION sublet_acquire(
    p_id text, p_secret_hash text, p_tenant text, p_job text, p_tier text, p_exclusivity text, p_vram bigint,
    p_least bigint, p_offers bigint, p_ttl bigint, p_wait bigint, p_cap bigint, p_only_host text,
    p_host text, p_pid bigint, p_started bigint,
    p_granted bigint  -- an epoch the caller knows to have been granted: behind it, the ledger is from the past
) RETURNS SETOF lease LANGUAGE plpgsql SET plan_cache_mode = force_generic_plan AS $$
DECLARE
    p pool%ROWTYPE;
    t tenant%ROWTYPE;
    d record;
    l lease%ROWTYPE;
    now_us bigint;
    size bigint;
    rate bigint;
    body text;
BEGIN
    SELECT * INTO p FROM pool WHERE id = 1 FOR UPDATE;
    IF p.waiting > 0 OR p.epoch < p_granted THEN
        RETURN;
    END IF;
    now_us := greatest(p.clock_us, sublet_now());
    SELECT * INTO t FROM tenant WHERE name = p_tenant AND NOT EXISTS (SELECT 1 FROM lease WHERE id = p_id);
    IF NOT FOUND OR t.gpu_us_per_day > 0 THEN
        RETURN;
    END IF;
    IF p_only_host = '' THEN
        SELECT id, capacity_bytes INTO d FROM device
        WHERE free_bytes >= p_vram AND state = 'ready'
          AND CASE p_exclusivity
                WHEN 'shared' THEN device_leases = 0 AND (session_leases = 0 OR sole_tenant = p_tenant)
                WHEN 'session' THEN device_leases = 0 AND (leases = 0 OR sole_tenant = p_tenant)
                WHEN 'device' THEN leases = 0
                ELSE false
              END
        ORDER BY free_bytes, id LIMIT 1;
    ELSE
        SELECT id, capacity_bytes INTO d FROM device
        WHERE host = p_only_host AND free_bytes >= p_vram AND state = 'ready'
          AND CASE p_exclusivity
                WHEN 'shared' THEN device_leases = 0 AND (session_leases = 0 OR sole_tenant = p_tenant)
                WHEN 'session' THEN device_leases = 0 AND (leases = 0 OR sole_tenant = p_tenant)
                WHEN 'device' THEN leases = 0
                ELSE false
              END
        ORDER BY free_bytes, id LIMIT 1;
    END IF;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    size := CASE p_exclusivity WHEN 'device' THEN d.capacity_bytes ELSE p_vram END;
    IF (t.max_leases > 0 AND t.live_leases + 1 > t.max_leases)
       OR (t.max_vram_bytes > 0 AND t.live_bytes + size > t.max_vram_bytes) THEN
        RETURN;
    END IF;
    rate := CASE p_exclusivity WHEN 'shared' THEN greatest(1, div(size::numeric * 1000000, d.capacity_bytes)::bigint) ELSE 1000000 END;
    p.epoch := p.epoch + 1;
    p.journal_seq := p.journal_seq + 1;
    l.slices := d.id || '=' || size;
    body := format('{"epoch":%s,"exclusivity":"%s","expires_at":%s,"reason":"capacity is free","slices":"%s","tier":"%s","ttl_us":%s}',
                   p.epoch, p_exclusivity, now_us + p_ttl, l.slices, p_tier, p_ttl);
    p.journal_hash := sublet_hash(p.journal_hash, 'main', p.journal_seq, now_us, 'lease.granted', p_tenant, p_id, body);
    WITH told AS (
        INSERT INTO journal (strand, seq, at, kind, tenant, subject, body, hash)
        VALUES ('main', p.journal_seq, now_us, 'lease.granted', p_tenant, p_id, body, p.journal_hash)
    ), held AS (
        INSERT INTO slice VALUES (d.id, p_id, p_tenant, p_exclusivity, size, rate)
    ), on_device AS (
        UPDATE device SET free_bytes = free_bytes - size, leases = leases + 1,
               session_leases = session_leases + (p_exclusivity = 'session')::int,
               device_leases = device_leases + (p_exclusivity = 'device')::int,
               sole_tenant = CASE WHEN sole_tenant IN ('', p_tenant) THEN p_tenant ELSE '*' END
        WHERE id = d.id
    ), of_tenant AS (
        UPDATE tenant SET used_us = sublet_used(t, now_us, (p.policy::json ->> 'half_life_us')::bigint), as_of = now_us,
               live_leases = live_leases + 1, live_bytes = live_bytes + size, rate_ppm = rate_ppm + rate
        WHERE name = p_tenant
    ), in_pool AS (
        UPDATE pool SET epoch = p.epoch, clock_us = now_us, journal_seq = p.journal_seq, journal_hash = p.journal_hash WHERE id = 1
    )
    INSERT INTO lease VALUES (
        p_id, p_tenant, p_job, p_tier, p_exclusivity, p_vram, p_least, p_offers, 1, p_ttl, p_wait, p_only_host,
        coalesce(least(nullif(p_cap, 0), nullif(CASE p_tier WHEN 'interactive' THEN (p.policy::json ->> 'hold_cap_us')::bigint END, 0)), 0),
        p_host, p_pid, p_started, p_secret_hash, 'active', p.epoch, size, l.slices, now_us, now_us, now_us + p_ttl,
        0, 0, 0, '', 'capacity is free', 1, now_us, 0,
        CASE p_job WHEN '' THEN 0 ELSE (SELECT count(*) FROM lease x WHERE x.tenant = p_tenant AND x.job = p_job
                                        AND x.reason = 'preempted' AND x.ended_at > now_us - 3600000000) END,
        1, now_us, CASE WHEN p_wait > 0 THEN now_us + p_wait ELSE 0 END, 0, 0, p.journal_hash, p.journal_hash
    ) RETURNING * INTO l;
    RETURN NEXT l;
END $$;

-- Being kept is not being used: a lease renewed as idle has been idle since it last worked. That is why the
-- function also returns what time it is.
CREATE FUNCTION sublet_renew(p_id text, p_epoch bigint, p_secret_hash text, p_busy bigint) RETURNS TABLE (renewed lease, answered_at bigint)
LANGUAGE plpgsql SET plan_cache_mode = force_generic_plan AS $$
DECLARE
    l lease%ROWTYPE;
    now_us bigint;
    capped boolean;
    wanted bigint;
    body text;
BEGIN
    SELECT * INTO l FROM lease WHERE id = p_id FOR UPDATE;
    IF NOT FOUND OR l.secret_hash <> p_secret_hash OR l.epoch <> p_epoch OR p_epoch <= 0 OR l.state <> 'active' THEN
        RETURN;
    END IF;
    -- Never earlier than the ledger's own clock: a standby's clock may be behind.
    SELECT greatest(clock_us, sublet_now()), waiting > 0 OR (policy::json ->> 'strict_hold')::boolean
    INTO now_us, capped FROM pool
    WHERE id = 1 AND NOT EXISTS (SELECT 1 FROM tenant WHERE name = l.tenant AND gpu_us_per_day > 0);
    IF NOT FOUND OR now_us >= l.expires_at THEN
        RETURN;
    END IF;
    wanted := now_us + l.ttl_us;
    IF capped AND l.hold_cap_us > 0 THEN
        IF now_us >= l.granted_at + l.hold_cap_us THEN
            RETURN;
        END IF;
        wanted := least(wanted, l.granted_at + l.hold_cap_us);
    END IF;
    l.expires_at := greatest(l.expires_at, wanted);
    IF p_busy = 1 OR l.busy = 1 THEN
        l.active_at := now_us;
    END IF;
    l.busy := p_busy;
    l.claimed := 1;
    l.strand_seq := l.strand_seq + 1;
    body := format('{"epoch":%s,"expires_at":%s}', l.epoch, l.expires_at);
    l.strand_hash := sublet_hash(l.strand_hash, 'lease:' || l.id, l.strand_seq, now_us, 'lease.renewed', l.tenant, l.id, body);
    WITH told AS (
        INSERT INTO journal (strand, seq, at, kind, tenant, subject, body, hash)
        VALUES ('lease:' || l.id, l.strand_seq, now_us, 'lease.renewed', l.tenant, l.id, body, l.strand_hash)
    )
    UPDATE lease SET expires_at = l.expires_at, busy = l.busy, active_at = l.active_at, claimed = 1,
                     strand_seq = l.strand_seq, strand_hash = l.strand_hash
    WHERE id = l.id;
    renewed := l;
    answered_at := now_us;
    RETURN NEXT;
END $$;

-- For leases on one host: a gang is given back seat by seat.
CREATE FUNCTION sublet_release(p_id text, p_secret_hash text) RETURNS boolean
LANGUAGE plpgsql SET plan_cache_mode = force_generic_plan AS $$
DECLARE
    p pool%ROWTYPE;
    t tenant%ROWTYPE;
    l record;
    s record;
    now_us bigint;
    elapsed bigint;
    held bigint := 0;
    rate bigint := 0;
    devices bigint := 0;
    whose text;
    body text;
BEGIN
    SELECT * INTO p FROM pool WHERE id = 1 FOR UPDATE;
    IF p.waiting > 0 THEN
        RETURN NULL;
    END IF;
    SELECT id, tenant, secret_hash, state, seats, epoch, exclusivity, granted_at, expires_at, strand_seq, strand_hash
    INTO l FROM lease WHERE id = p_id FOR UPDATE;
    IF NOT FOUND OR l.secret_hash <> p_secret_hash OR l.state <> 'active' OR l.seats > 0 THEN
        RETURN NULL;
    END IF;
    SELECT * INTO t FROM tenant WHERE name = l.tenant;
    IF t.gpu_us_per_day > 0 THEN
        RETURN NULL;
    END IF;
    now_us := greatest(p.clock_us, sublet_now());
    IF now_us >= l.expires_at THEN
        RETURN NULL;
    END IF;
    FOR s IN DELETE FROM slice WHERE lease_id = p_id RETURNING * LOOP
        held := held + s.vram_bytes;
        rate := rate + s.rate_ppm;
        devices := devices + 1;
        UPDATE device SET free_bytes = free_bytes + s.vram_bytes, leases = leases - 1,
               session_leases = session_leases - (l.exclusivity = 'session')::int,
               device_leases = device_leases - (l.exclusivity = 'device')::int,
               sole_tenant = CASE WHEN leases = 1 THEN '' ELSE sole_tenant END
        WHERE id = s.device_id RETURNING sole_tenant INTO whose;
        IF whose = '*' THEN
            SELECT min(tenant) INTO whose FROM slice WHERE device_id = s.device_id HAVING count(DISTINCT tenant) = 1;
            IF FOUND THEN
                UPDATE device SET sole_tenant = whose WHERE id = s.device_id;
            END IF;
        END IF;
    END LOOP;
    elapsed := greatest(0, now_us - l.granted_at);
    p.journal_seq := p.journal_seq + 1;
    body := format('{"detail":"released by its holder","epoch":%s,"gpu_us":%s,"reason":"released","settled":true,"strand_hash":"%s","strand_seq":%s}',
                   l.epoch, elapsed * devices, l.strand_hash, l.strand_seq);
    p.journal_hash := sublet_hash(p.journal_hash, 'main', p.journal_seq, now_us, 'lease.ended', l.tenant, l.id, body);
    WITH told AS (
        INSERT INTO journal (strand, seq, at, kind, tenant, subject, body, hash)
        VALUES ('main', p.journal_seq, now_us, 'lease.ended', l.tenant, l.id, body, p.journal_hash)
    ), of_tenant AS (
        UPDATE tenant SET used_us = sublet_used(t, now_us, (p.policy::json ->> 'half_life_us')::bigint), as_of = now_us,
               live_leases = live_leases - 1, live_bytes = live_bytes - held, rate_ppm = rate_ppm - rate
        WHERE name = l.tenant
    ), in_pool AS (
        UPDATE pool SET clock_us = now_us, journal_seq = p.journal_seq, journal_hash = p.journal_hash WHERE id = 1
    )
    UPDATE lease SET state = 'ended', reason = 'released', detail = 'released by its holder',
           ended_at = greatest(l.granted_at, now_us), settled_at = now_us, busy = 0, offer_until = 0
    WHERE id = l.id;
    RETURN true;
END $$;

-- A commit covers one step or several consecutive ones, and its journal row carries a digest of the text it
-- stored.
CREATE FUNCTION sublet_said(p_first text, p_second text) RETURNS text LANGUAGE sql IMMUTABLE AS $$
    SELECT encode(sha256(convert_to(length(p_first) || ':' || p_first || p_second, 'UTF8')), 'hex')
$$;

-- Takes no pool lock, so commits of different jobs do not queue behind each other. Starts no job, refuses
-- nothing, and leaves tenants with limited storage to the verb in Python.
CREATE FUNCTION sublet_commit(
    p_id text, p_epoch bigint, p_secret_hash text, p_job text, p_key text, p_first bigint, p_step bigint, p_fingerprint text,
    p_expected bigint, p_digest text, p_cursor text, p_outcome text,
    p_new_bytes bigint, p_whole_bytes bigint
) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
    l lease%ROWTYPE;
    h head%ROWTYPE;
    e effect%ROWTYPE;
    now_us bigint;
    body text;
BEGIN
    SELECT * INTO l FROM lease WHERE id = p_id FOR UPDATE;
    IF NOT FOUND OR l.secret_hash <> p_secret_hash OR l.epoch <> p_epoch OR p_epoch <= 0 THEN
        RETURN NULL;
    END IF;
    -- The lease's row is locked before the tenant is looked at: see `verbs.progress.storage_quota`.
    IF p_new_bytes > 0 AND EXISTS (SELECT 1 FROM tenant WHERE name = l.tenant AND max_storage_bytes > 0) THEN
        RETURN NULL;
    END IF;
    SELECT * INTO h FROM head WHERE job = p_job FOR UPDATE;
    IF NOT FOUND OR h.tenant <> l.tenant OR h.version <> p_expected OR p_first <> h.step + 1 OR p_epoch < h.epoch THEN
        RETURN NULL;
    END IF;
    SELECT * INTO e FROM effect WHERE key = p_key FOR UPDATE;
    IF FOUND AND (e.completed = 1 OR e.owner <> p_id OR e.fingerprint <> p_fingerprint) THEN
        RETURN NULL;
    END IF;
    SELECT greatest(clock_us, sublet_now()) INTO now_us FROM pool WHERE id = 1;
    IF NOT ((l.state = 'active' AND now_us < l.expires_at) OR (l.state = 'revoking' AND now_us < l.deadline_at)) THEN
        RETURN NULL;
    END IF;
    h.strand_seq := h.strand_seq + 1;
    body := format('{"cursor":"%s","digest":%s,"epoch":%s,"fingerprint":%s,"first":%s,"lease":"%s","said":"%s","step":%s,"version":%s}',
                   sublet_said('', p_cursor), to_json(p_digest), p_epoch, to_json(p_fingerprint), p_first, p_id,
                   sublet_said(p_fingerprint, p_outcome), p_step, h.version + 1);
    h.strand_hash := sublet_hash(h.strand_hash, 'job:' || p_job, h.strand_seq, now_us, 'step.committed', l.tenant, p_key, body);
    INSERT INTO journal (strand, seq, at, kind, tenant, subject, body, hash)
    VALUES ('job:' || p_job, h.strand_seq, now_us, 'step.committed', l.tenant, p_key, body, h.strand_hash);
    UPDATE head SET version = h.version + 1, step = p_step, digest = p_digest, cursor_text = p_cursor, epoch = p_epoch,
           committed_at = now_us, strand_seq = h.strand_seq, strand_hash = h.strand_hash,
           stored_bytes = stored_bytes + p_new_bytes
    WHERE job = p_job;
    IF p_whole_bytes > 0 THEN
        INSERT INTO stored_version VALUES (p_job, h.version + 1, p_new_bytes, p_whole_bytes);
    END IF;
    INSERT INTO effect VALUES (p_key, p_fingerprint, p_job, p_id, p_epoch, 1, p_outcome, h.version + 1)
    ON CONFLICT (key) DO UPDATE SET owner = excluded.owner, epoch = excluded.epoch, completed = 1,
                                    outcome = excluded.outcome, version = excluded.version;
    UPDATE lease SET committed_at = now_us, active_at = now_us WHERE id = p_id;
    RETURN h.version + 1;
END $$;

-- hot verbs of items ----------------------------------------------------------------------------------------
-- As above, and without the pool lock.

CREATE FUNCTION sublet_tell_consumer(c consumer, q queue, now_us bigint, kind text, body text) RETURNS consumer LANGUAGE plpgsql AS $$
BEGIN
    c.strand_seq := c.strand_seq + 1;
    c.strand_hash := sublet_hash(c.strand_hash, 'consumer:' || c.id, c.strand_seq, now_us, kind, q.tenant, q.name, body);
    INSERT INTO journal (strand, seq, at, kind, tenant, subject, body, hash)
    VALUES ('consumer:' || c.id, c.strand_seq, now_us, kind, q.tenant, q.name, body, c.strand_hash);
    RETURN c;
END $$;

-- Returns how many were new; nothing for a batch that was published before.
CREATE FUNCTION sublet_publish(
    p_consumer bigint, p_batch bigint, p_keys text[], p_bodies text[], p_priorities bigint[], p_delays bigint[]
) RETURNS TABLE (new bigint, queue_id bigint) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    c consumer%ROWTYPE;
    q queue%ROWTYPE;
    now_us bigint;
    n bigint;
BEGIN
    SELECT * INTO c FROM consumer WHERE id = p_consumer FOR UPDATE;
    IF NOT FOUND OR p_batch <= c.batch THEN
        RETURN;
    END IF;
    SELECT * INTO q FROM queue WHERE id = c.queue;
    now_us := sublet_now();
    INSERT INTO item (queue, key, state, priority, visible_at, place, delivery, failures, losses, owner, published_at, done_at,
                      work_us, body, result, error)
    SELECT q.id, nullif(d.key, ''), CASE WHEN d.delay > 0 THEN 'delayed' ELSE 'ready' END, d.priority, now_us + d.delay,
           now_us + d.delay, 0, 0, 0, 0, now_us, 0, 0, d.body, '', ''
    FROM unnest(p_keys, p_bodies, p_priorities, p_delays) WITH ORDINALITY AS d(key, body, priority, delay, number)
    ORDER BY d.number
    ON CONFLICT DO NOTHING;
    GET DIAGNOSTICS n = ROW_COUNT;
    c := sublet_tell_consumer(c, q, now_us, 'items.published',
                           format('{"count":%s,"new":%s}', array_length(p_bodies, 1), n));
    UPDATE consumer SET strand_seq = c.strand_seq, strand_hash = c.strand_hash, batch = p_batch, batch_new = n,
           published = published + n
    WHERE id = p_consumer;
    RETURN QUERY SELECT n, q.id;
END $$;

-- Returns the items in no order, or one row without a number when the verb in Python must decide: a paused
-- queue, a limited one, an item that dies.
CREATE FUNCTION sublet_pull(p_consumer bigint, p_most bigint, p_visibility bigint) RETURNS TABLE (
    id bigint, key text, body text, delivery bigint, failures bigint, losses bigint, priority bigint, published_at bigint, place bigint
) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    q queue%ROWTYPE;
    now_us bigint := sublet_now();
BEGIN
    SELECT queue.* INTO q FROM consumer JOIN queue ON queue.id = consumer.queue WHERE consumer.id = p_consumer;
    IF NOT FOUND OR q.paused = 1 OR q.concurrency > 0 THEN
        RETURN QUERY SELECT NULL::bigint, NULL, NULL, 0::bigint, 0::bigint, 0::bigint, 0::bigint, 0::bigint, 0::bigint;
        RETURN;
    END IF;
    IF EXISTS (SELECT FROM item WHERE queue = q.id AND state IN ('delayed', 'leased') AND visible_at <= now_us) THEN
        IF EXISTS (SELECT FROM item WHERE queue = q.id AND state IN ('delayed', 'leased') AND visible_at <= now_us
                   AND state = 'leased' AND item.losses + 1 >= q.losses) THEN
            RETURN QUERY SELECT NULL::bigint, NULL, NULL, 0::bigint, 0::bigint, 0::bigint, 0::bigint, 0::bigint, 0::bigint;
            RETURN;
        END IF;
        WITH due AS (
            SELECT id, state FROM item WHERE queue = q.id AND state IN ('delayed', 'leased') AND visible_at <= now_us
            ORDER BY visible_at LIMIT 1000 FOR UPDATE SKIP LOCKED
        )
        UPDATE item SET state = 'ready', losses = item.losses + CASE due.state WHEN 'leased' THEN 1 ELSE 0 END,
               visible_at = CASE due.state WHEN 'leased' THEN now_us ELSE item.visible_at END
        FROM due WHERE item.id = due.id;
    END IF;
    RETURN QUERY
    WITH picked AS (
        SELECT id FROM item WHERE queue = q.id AND state = 'ready' ORDER BY priority DESC, place, id LIMIT p_most
        FOR UPDATE SKIP LOCKED
    )
    UPDATE item SET state = 'leased', owner = p_consumer, delivery = item.delivery + 1, visible_at = now_us + p_visibility
    FROM picked WHERE item.id = picked.id
    RETURNING item.id, item.key, item.body, item.delivery, item.failures, item.losses, item.priority, item.published_at, item.place;
END $$;

-- Returns true when every item belonged to this consumer and is done now; otherwise nothing, and nothing was
-- changed.
CREATE FUNCTION sublet_complete(
    p_consumer bigint, p_items bigint[], p_deliveries bigint[], p_results text[], p_work bigint[], p_body text,
    p_lease text, p_epoch bigint, p_secret_hash text
) RETURNS boolean LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    c consumer%ROWTYPE;
    q queue%ROWTYPE;
    l lease%ROWTYPE;
    now_us bigint;
    slot_us CONSTANT bigint := 10000000;
    n bigint;
BEGIN
    IF p_lease <> '' THEN
        SELECT * INTO l FROM lease WHERE id = p_lease FOR UPDATE;
        IF NOT FOUND OR l.secret_hash <> p_secret_hash OR l.epoch <> p_epoch OR p_epoch <= 0 THEN
            RETURN NULL;
        END IF;
    END IF;
    SELECT * INTO c FROM consumer WHERE id = p_consumer FOR UPDATE;
    IF NOT FOUND THEN
        RETURN NULL;
    END IF;
    SELECT * INTO q FROM queue WHERE id = c.queue;
    IF p_lease <> '' AND l.tenant <> q.tenant THEN
        RETURN NULL;
    END IF;
    SELECT count(*) INTO n FROM (
        -- By number, in the order given. The expressions keep the planner off the index of leased items.
        SELECT i.id FROM item i JOIN unnest(p_items, p_deliveries) AS a(item, number) ON i.id = a.item
        WHERE i.queue + 0 = q.id AND i.state || '' = 'leased' AND i.owner = p_consumer AND i.delivery = a.number
        FOR UPDATE OF i
    ) AS mine;
    IF n <> array_length(p_items, 1) THEN
        RETURN NULL;
    END IF;
    SELECT greatest(clock_us, sublet_now()) INTO now_us FROM pool WHERE id = 1;
    IF p_lease <> '' AND NOT ((l.state = 'active' AND now_us < l.expires_at)
                              OR (l.state = 'revoking' AND now_us < l.deadline_at)) THEN
        RETURN NULL;
    END IF;
    UPDATE item SET state = 'done', result = a.result, error = '', done_at = now_us, work_us = a.work
    FROM unnest(p_items, p_results, p_work) AS a(item, result, work) WHERE item.id = a.item;
    c := sublet_tell_consumer(c, q, now_us, 'items.completed', p_body);
    UPDATE consumer SET strand_seq = c.strand_seq, strand_hash = c.strand_hash, completed = completed + n,
           work_us = work_us + (SELECT sum(w) FROM unnest(p_work) AS w),
           tempo_slot = now_us / slot_us,
           tempo_count = CASE WHEN c.tempo_slot = now_us / slot_us THEN c.tempo_count + n ELSE n END,
           tempo_before = CASE c.tempo_slot WHEN now_us / slot_us THEN c.tempo_before
                          WHEN now_us / slot_us - 1 THEN c.tempo_count ELSE 0 END
    WHERE id = p_consumer;
    IF p_lease <> '' THEN
        UPDATE lease SET committed_at = now_us, active_at = now_us WHERE id = p_lease;
    END IF;
    RETURN true;
END $$;
