-- Proof of teardown, one row per lease that had something to tear down.
CREATE TABLE receipt (
    lease_id TEXT PRIMARY KEY,
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
    detail TEXT NOT NULL
);
CREATE INDEX receipt_newest ON receipt (at);
