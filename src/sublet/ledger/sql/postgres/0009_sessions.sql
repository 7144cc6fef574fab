-- A tenant's stay in the studio. What it is now follows from this row and the one of its current lease (core.session).
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

-- Every lease a session had: what it used is what they used.
CREATE TABLE session_lease (
    session_id TEXT NOT NULL,
    number BIGINT NOT NULL CHECK (number > 0),
    lease_id TEXT NOT NULL,
    bound_at BIGINT NOT NULL,
    PRIMARY KEY (session_id, number)
);
CREATE UNIQUE INDEX session_lease_once ON session_lease (lease_id);

ALTER TABLE tenant ADD COLUMN max_sessions BIGINT NOT NULL DEFAULT 0 CHECK (max_sessions >= 0);
ALTER TABLE tenant ADD COLUMN max_storage_bytes BIGINT NOT NULL DEFAULT 0 CHECK (max_storage_bytes >= 0);

-- What each version of a job is charged with (core.storage). A tenant's charge is the sum of its heads'.
CREATE TABLE stored_version (
    job TEXT NOT NULL,
    version BIGINT NOT NULL,
    charged_bytes BIGINT NOT NULL CHECK (charged_bytes >= 0),
    whole_bytes BIGINT NOT NULL,
    PRIMARY KEY (job, version)
);
ALTER TABLE head ADD COLUMN stored_bytes BIGINT NOT NULL DEFAULT 0 CHECK (stored_bytes >= 0);
CREATE INDEX head_of_tenant ON head (tenant);

-- What a GPU-hour costs from a moment on, in millionths; -1: no longer on the list. Rows are only added.
CREATE TABLE price (
    device_class TEXT NOT NULL,
    tier TEXT NOT NULL,
    valid_from BIGINT NOT NULL,
    micro_per_gpu_hour BIGINT NOT NULL CHECK (micro_per_gpu_hour >= -1),
    PRIMARY KEY (device_class, tier, valid_from)
);

DROP FUNCTION sublet_commit(text, bigint, text, text, text, bigint, bigint, text, bigint, text, text, text);

-- As it was, and counts what the version adds; a tenant whose storage is limited is judged by the verb in `core`'s words instead.
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
    -- The lease's row is locked before the tenant is looked at: see `ledger.storage.begin_limiting`.
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

DROP FUNCTION sublet_renew(text, bigint, text, bigint);

-- As it was, but being kept is not being used: renewed as idle, it has been idle since it last worked. So it says apart what time it is.
CREATE FUNCTION sublet_renew(p_id text, p_epoch bigint, p_secret_hash text, p_busy bigint) RETURNS TABLE (renewed lease, answered_at bigint)
LANGUAGE plpgsql AS $$
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
    IF EXISTS (SELECT 1 FROM tenant WHERE name = l.tenant AND gpu_us_per_day > 0) THEN
        RETURN;
    END IF;
    -- Not before any time the ledger has lived through: a standby's clock may be behind.
    SELECT greatest(clock_us, sublet_now()), waiting > 0 OR (policy::json ->> 'strict_hold')::boolean
    INTO now_us, capped FROM pool WHERE id = 1;
    IF now_us >= l.expires_at THEN
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
    INSERT INTO journal (strand, seq, at, kind, tenant, subject, body, hash)
    VALUES ('lease:' || l.id, l.strand_seq, now_us, 'lease.renewed', l.tenant, l.id, body, l.strand_hash);
    UPDATE lease SET expires_at = l.expires_at, busy = l.busy, active_at = l.active_at, claimed = 1,
                     strand_seq = l.strand_seq, strand_hash = l.strand_hash
    WHERE id = l.id;
    renewed := l;
    answered_at := now_us;
    RETURN NEXT;
END $$;
