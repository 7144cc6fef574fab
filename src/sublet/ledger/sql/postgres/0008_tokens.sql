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
