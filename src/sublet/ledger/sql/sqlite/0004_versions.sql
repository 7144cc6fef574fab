-- Versions of a job that outlive the chain behind its head: kept by retention (no tag) or tagged.
CREATE TABLE kept_version (
    job TEXT NOT NULL,
    version INTEGER NOT NULL CHECK (version > 0),
    tag TEXT NOT NULL,
    digest TEXT NOT NULL,
    step INTEGER NOT NULL,
    at INTEGER NOT NULL,
    PRIMARY KEY (job, version, tag)
) STRICT, WITHOUT ROWID;
CREATE UNIQUE INDEX kept_version_by_tag ON kept_version (job, tag) WHERE tag <> '';

ALTER TABLE head ADD COLUMN floor INTEGER NOT NULL DEFAULT 0;
ALTER TABLE head ADD COLUMN sweeps INTEGER NOT NULL DEFAULT 0;

-- Who this ledger is, for replicas to know it by; the same after a restore.
INSERT INTO meta VALUES ('ledger_id', lower(hex(randomblob(16))));
INSERT INTO meta VALUES ('heads_current', 'yes');
