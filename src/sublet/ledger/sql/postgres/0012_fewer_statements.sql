-- The hot verbs of a lease as they were, in fewer statements: what a verb writes is one statement, whose parts change different tables. Starting a statement
-- costs the server more than most of these do. Their plans are made once: the one statement for which a value made a difference, the choice of a
-- device, is two now. Of a wide row only what is used is read.

CREATE OR REPLACE FUNCTION sublet_acquire(
    p_id text, p_secret_hash text, p_tenant text, p_job text, p_tier text, p_exclusivity text, p_vram bigint,
    p_least bigint, p_offers bigint, p_ttl bigint, p_wait bigint, p_cap bigint, p_only_host text,
    p_host text, p_pid bigint, p_started bigint
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
    IF p.waiting > 0 THEN
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

CREATE OR REPLACE FUNCTION sublet_renew(p_id text, p_epoch bigint, p_secret_hash text, p_busy bigint) RETURNS TABLE (renewed lease, answered_at bigint)
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
    -- Not before any time the ledger has lived through: a standby's clock may be behind.
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

CREATE OR REPLACE FUNCTION sublet_release(p_id text, p_secret_hash text) RETURNS boolean
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

-- It calls what is only stable; said so, it becomes a part of the expressions that use it instead of a call of its own.
ALTER FUNCTION sublet_hash(text, text, bigint, bigint, text, text, text, text) STABLE;
