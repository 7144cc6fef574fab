-- One lease over several hosts. What is of one host has no seat: its lease row says it all.
ALTER TABLE lease ADD COLUMN spread TEXT NOT NULL DEFAULT 'no';
ALTER TABLE lease ADD COLUMN seats INTEGER NOT NULL DEFAULT 0;  -- of a gang, how many hosts; 0: one host

CREATE TABLE seat (
    lease_id TEXT NOT NULL,
    host TEXT NOT NULL,
    rank INTEGER NOT NULL,
    slices TEXT NOT NULL,
    pid INTEGER NOT NULL,            -- 0: nobody sits there
    pid_started INTEGER NOT NULL,
    address TEXT NOT NULL,
    settled_at INTEGER NOT NULL,
    PRIMARY KEY (lease_id, host)
) STRICT, WITHOUT ROWID;
CREATE INDEX seat_live ON seat (host) WHERE settled_at = 0;

-- A gang has a Receipt from each of its hosts; of other leases `host` is empty.
ALTER TABLE receipt RENAME TO receipt_of_lease;
DROP INDEX receipt_newest;
CREATE TABLE receipt (
    lease_id TEXT NOT NULL,
    tenant TEXT NOT NULL,
    at INTEGER NOT NULL,
    devices TEXT NOT NULL,
    proven INTEGER NOT NULL,
    ladder TEXT NOT NULL,
    containment TEXT NOT NULL,
    pids TEXT NOT NULL,
    freed_bytes INTEGER NOT NULL,
    scrubbed_bytes INTEGER NOT NULL,
    duration_us INTEGER NOT NULL,
    detail TEXT NOT NULL,
    host TEXT NOT NULL DEFAULT '',
    PRIMARY KEY (lease_id, host)
) STRICT;
INSERT INTO receipt SELECT *, '' FROM receipt_of_lease;
DROP TABLE receipt_of_lease;
CREATE INDEX receipt_newest ON receipt (at);
