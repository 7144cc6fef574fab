-- What a tenant shows a service to be let in. Only the SHA-256 of the secret is here; using a token writes nothing.
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

-- GPU time by the day (core.allowance): what is left of it as of an instant. 0 a day: no such quota.
ALTER TABLE tenant ADD COLUMN gpu_us_per_day BIGINT NOT NULL DEFAULT 0 CHECK (gpu_us_per_day >= 0);
ALTER TABLE tenant ADD COLUMN left_us BIGINT NOT NULL DEFAULT 0 CHECK (left_us <= gpu_us_per_day OR gpu_us_per_day = 0);
ALTER TABLE tenant ADD COLUMN left_at BIGINT NOT NULL DEFAULT 0;

-- The hot verbs, as they were, but not for a tenant that pays for its GPU time: they answer nothing, and the caller runs the same
-- verb through `core`. The lease's row is locked before the tenant is looked at: see `ledger.allowances.change`.
CREATE OR REPLACE FUNCTION sublet_renew(p_id text, p_epoch bigint, p_secret_hash text, p_busy bigint) RETURNS SETOF lease
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
    l.busy := p_busy;
    l.active_at := now_us;
    l.claimed := 1;
    l.strand_seq := l.strand_seq + 1;
    body := format('{"epoch":%s,"expires_at":%s}', l.epoch, l.expires_at);
    l.strand_hash := sublet_hash(l.strand_hash, 'lease:' || l.id, l.strand_seq, now_us, 'lease.renewed', l.tenant, l.id, body);
    INSERT INTO journal (strand, seq, at, kind, tenant, subject, body, hash)
    VALUES ('lease:' || l.id, l.strand_seq, now_us, 'lease.renewed', l.tenant, l.id, body, l.strand_hash);
    UPDATE lease SET expires_at = l.expires_at, busy = l.busy, active_at = l.active_at, claimed = 1,
                     strand_seq = l.strand_seq, strand_hash = l.strand_hash
    WHERE id = l.id;
    RETURN NEXT l;
END $$;

CREATE OR REPLACE FUNCTION sublet_acquire(
    p_id text, p_secret_hash text, p_tenant text, p_job text, p_tier text, p_exclusivity text, p_vram bigint,
    p_least bigint, p_offers bigint, p_ttl bigint, p_wait bigint, p_cap bigint, p_only_host text,
    p_host text, p_pid bigint, p_started bigint
) RETURNS SETOF lease LANGUAGE plpgsql AS $$
DECLARE
    p pool%ROWTYPE;
    t tenant%ROWTYPE;
    d device%ROWTYPE;
    l lease%ROWTYPE;
    now_us bigint;
    size bigint;
    rate bigint;
    body text;
BEGIN
    SELECT * INTO p FROM pool WHERE id = 1 FOR UPDATE;
    IF p.waiting > 0 THEN
        RETURN;
    END IF;
    now_us := greatest(p.clock_us, sublet_now());
    PERFORM 1 FROM lease WHERE id = p_id;
    IF FOUND THEN
        RETURN;
    END IF;
    SELECT * INTO t FROM tenant WHERE name = p_tenant;
    IF NOT FOUND OR t.gpu_us_per_day > 0 THEN
        RETURN;
    END IF;
    SELECT * INTO d FROM device
    WHERE free_bytes >= p_vram AND state = 'ready' AND (p_only_host = '' OR host = p_only_host)
      AND CASE p_exclusivity
            WHEN 'shared' THEN device_leases = 0 AND (session_leases = 0 OR sole_tenant = p_tenant)
            WHEN 'session' THEN device_leases = 0 AND (leases = 0 OR sole_tenant = p_tenant)
            WHEN 'device' THEN leases = 0
            ELSE false
          END
    ORDER BY free_bytes, id LIMIT 1;
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
    INSERT INTO journal (strand, seq, at, kind, tenant, subject, body, hash)
    VALUES ('main', p.journal_seq, now_us, 'lease.granted', p_tenant, p_id, body, p.journal_hash);
    INSERT INTO lease VALUES (
        p_id, p_tenant, p_job, p_tier, p_exclusivity, p_vram, p_least, p_offers, 1, p_ttl, p_wait, p_only_host,
        coalesce(least(nullif(p_cap, 0), nullif(CASE p_tier WHEN 'interactive' THEN (p.policy::json ->> 'hold_cap_us')::bigint END, 0)), 0),
        p_host, p_pid, p_started, p_secret_hash, 'active', p.epoch, size, l.slices, now_us, now_us, now_us + p_ttl,
        0, 0, 0, '', 'capacity is free', 1, now_us, 0,
        CASE p_job WHEN '' THEN 0 ELSE (SELECT count(*) FROM lease x WHERE x.tenant = p_tenant AND x.job = p_job
                                        AND x.reason = 'preempted' AND x.ended_at > now_us - 3600000000) END,
        1, now_us, CASE WHEN p_wait > 0 THEN now_us + p_wait ELSE 0 END, 0, 0, p.journal_hash, p.journal_hash
    ) RETURNING * INTO l;
    INSERT INTO slice VALUES (d.id, p_id, p_tenant, p_exclusivity, size, rate);
    UPDATE device SET free_bytes = free_bytes - size, leases = leases + 1,
           session_leases = session_leases + (p_exclusivity = 'session')::int,
           device_leases = device_leases + (p_exclusivity = 'device')::int,
           sole_tenant = CASE WHEN sole_tenant IN ('', p_tenant) THEN p_tenant ELSE '*' END
    WHERE id = d.id;
    UPDATE tenant SET used_us = sublet_used(t, now_us, (p.policy::json ->> 'half_life_us')::bigint), as_of = now_us,
           live_leases = live_leases + 1, live_bytes = live_bytes + size, rate_ppm = rate_ppm + rate
    WHERE name = p_tenant;
    UPDATE pool SET epoch = p.epoch, clock_us = now_us, journal_seq = p.journal_seq, journal_hash = p.journal_hash WHERE id = 1;
    RETURN NEXT l;
END $$;

CREATE OR REPLACE FUNCTION sublet_release(p_id text, p_secret_hash text) RETURNS boolean LANGUAGE plpgsql AS $$
DECLARE
    p pool%ROWTYPE;
    t tenant%ROWTYPE;
    l lease%ROWTYPE;
    s record;
    now_us bigint;
    elapsed bigint;
    held bigint := 0;
    rate bigint := 0;
    devices bigint := 0;
    body text;
BEGIN
    SELECT * INTO p FROM pool WHERE id = 1 FOR UPDATE;
    IF p.waiting > 0 THEN
        RETURN NULL;
    END IF;
    SELECT * INTO l FROM lease WHERE id = p_id FOR UPDATE;
    IF NOT FOUND OR l.secret_hash <> p_secret_hash OR l.state <> 'active' THEN
        RETURN NULL;
    END IF;
    IF EXISTS (SELECT 1 FROM tenant WHERE name = l.tenant AND gpu_us_per_day > 0) THEN
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
               sole_tenant = CASE
                   WHEN leases = 1 THEN ''
                   WHEN sole_tenant = '*' AND (SELECT count(DISTINCT x.tenant) FROM slice x WHERE x.device_id = device.id) = 1
                       THEN (SELECT min(x.tenant) FROM slice x WHERE x.device_id = device.id)
                   ELSE sole_tenant END
        WHERE id = s.device_id;
    END LOOP;
    elapsed := greatest(0, now_us - l.granted_at);
    p.journal_seq := p.journal_seq + 1;
    body := format('{"detail":"released by its holder","epoch":%s,"gpu_us":%s,"reason":"released","settled":true,"strand_hash":"%s","strand_seq":%s}',
                   l.epoch, elapsed * devices, l.strand_hash, l.strand_seq);
    p.journal_hash := sublet_hash(p.journal_hash, 'main', p.journal_seq, now_us, 'lease.ended', l.tenant, l.id, body);
    INSERT INTO journal (strand, seq, at, kind, tenant, subject, body, hash)
    VALUES ('main', p.journal_seq, now_us, 'lease.ended', l.tenant, l.id, body, p.journal_hash);
    UPDATE lease SET state = 'ended', reason = 'released', detail = 'released by its holder',
           ended_at = greatest(l.granted_at, now_us), settled_at = now_us, busy = 0, offer_until = 0
    WHERE id = l.id;
    SELECT * INTO t FROM tenant WHERE name = l.tenant;
    UPDATE tenant SET used_us = sublet_used(t, now_us, (p.policy::json ->> 'half_life_us')::bigint), as_of = now_us,
           live_leases = live_leases - 1, live_bytes = live_bytes - held, rate_ppm = rate_ppm - rate
    WHERE name = l.tenant;
    UPDATE pool SET clock_us = now_us, journal_seq = p.journal_seq, journal_hash = p.journal_hash WHERE id = 1;
    RETURN true;
END $$;
