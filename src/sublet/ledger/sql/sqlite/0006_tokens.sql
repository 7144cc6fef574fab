-- What a tenant shows a service to be let in. Only the SHA-256 of the secret is here; using a token writes nothing.
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

-- GPU time by the day (core.allowance): what is left of it as of an instant. 0 a day: no such quota.
ALTER TABLE tenant ADD COLUMN gpu_us_per_day INTEGER NOT NULL DEFAULT 0 CHECK (gpu_us_per_day >= 0);
ALTER TABLE tenant ADD COLUMN left_us INTEGER NOT NULL DEFAULT 0 CHECK (left_us <= gpu_us_per_day OR gpu_us_per_day = 0);
ALTER TABLE tenant ADD COLUMN left_at INTEGER NOT NULL DEFAULT 0;
