-- Block leases: who may write to which region of durable storage, and which checkpoint in it counts. Rows of removed blocks stay.
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
    secret_before TEXT NOT NULL,  -- hash of the last holder's, so that it is told that it was fenced
    state TEXT NOT NULL CHECK (state IN ('held', 'kept', 'gone')),
    epoch BIGINT NOT NULL CHECK (epoch > 0),
    created_at BIGINT NOT NULL,
    granted_at BIGINT NOT NULL,
    expires_at BIGINT NOT NULL,
    ended_at BIGINT NOT NULL,
    removed_at BIGINT NOT NULL,
    reason TEXT NOT NULL,
    detail TEXT NOT NULL,
    sequence BIGINT NOT NULL CHECK (sequence >= -1),  -- -1: unknown since a backup was put back
    digest TEXT NOT NULL,
    bytes BIGINT NOT NULL,
    recorded_at BIGINT NOT NULL
) WITH (fillfactor = 50);
CREATE INDEX block_of_tenant ON block (tenant, state);
