-- One lease over several hosts. What is of one host has no seat: its lease row says it all.
ALTER TABLE lease ADD COLUMN spread text NOT NULL DEFAULT 'no';
ALTER TABLE lease ADD COLUMN seats bigint NOT NULL DEFAULT 0;  -- of a gang, how many hosts; 0: one host

CREATE TABLE seat (
    lease_id text NOT NULL,
    host text NOT NULL,
    rank bigint NOT NULL,
    slices text NOT NULL,
    pid bigint NOT NULL,            -- 0: nobody sits there
    pid_started bigint NOT NULL,
    address text NOT NULL,
    settled_at bigint NOT NULL,
    PRIMARY KEY (lease_id, host)
);
CREATE INDEX seat_live ON seat (host) WHERE settled_at = 0;

-- A gang has a Receipt from each of its hosts; of other leases `host` is empty.
ALTER TABLE receipt ADD COLUMN host text NOT NULL DEFAULT '';
ALTER TABLE receipt DROP CONSTRAINT receipt_pkey;
ALTER TABLE receipt ADD PRIMARY KEY (lease_id, host);

-- As it was, for leases of one host. A gang is given back seat by seat.
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
    IF NOT FOUND OR l.secret_hash <> p_secret_hash OR l.state <> 'active' OR l.seats > 0 THEN
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
