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

ALTER TABLE head ADD COLUMN floor BIGINT NOT NULL DEFAULT 0;
ALTER TABLE head ADD COLUMN sweeps BIGINT NOT NULL DEFAULT 0;

-- Who this ledger is, for replicas to know it by; the same after a restore.
INSERT INTO meta VALUES ('ledger_id', replace(gen_random_uuid()::text, '-', ''));
INSERT INTO meta VALUES ('heads_current', 'yes');
