-- Block leases: who may write to which region of durable storage, and which checkpoint in it counts. Rows of removed blocks stay.
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
    secret_before TEXT NOT NULL,  -- hash of the last holder's, so that it is told that it was fenced
    state TEXT NOT NULL CHECK (state IN ('held', 'kept', 'gone')),
    epoch INTEGER NOT NULL CHECK (epoch > 0),
    created_at INTEGER NOT NULL,
    granted_at INTEGER NOT NULL,
    expires_at INTEGER NOT NULL,
    ended_at INTEGER NOT NULL,
    removed_at INTEGER NOT NULL,
    reason TEXT NOT NULL,
    detail TEXT NOT NULL,
    sequence INTEGER NOT NULL CHECK (sequence >= -1),  -- -1: unknown since a backup was put back
    digest TEXT NOT NULL,
    bytes INTEGER NOT NULL,
    recorded_at INTEGER NOT NULL
) STRICT;
CREATE INDEX block_of_tenant ON block (tenant, state);
