-- Where each strand goes on after the rows that were removed from its beginning. A row of the main strand carries the digest of this table.
CREATE TABLE pruned (
    strand TEXT PRIMARY KEY,
    seq BIGINT NOT NULL CHECK (seq >= 0),
    hash TEXT NOT NULL
);

-- Leases whose journal rows are archived, until a batch removes them: what they used, for the sums.
CREATE TABLE leaving (
    lease_id TEXT PRIMARY KEY,
    upto BIGINT NOT NULL,   -- the journal row up to which was archived with it
    used TEXT NOT NULL
);

-- Commits whose journal rows are archived, of leases that are still there: a report cuts held time at them.
CREATE TABLE pruned_commit (
    lease_id TEXT NOT NULL,
    job TEXT NOT NULL,
    at BIGINT NOT NULL,
    steps BIGINT NOT NULL,
    compute_us BIGINT NOT NULL
);
CREATE INDEX pruned_commit_of_lease ON pruned_commit (lease_id);

-- What removed leases used, by the day (UTC) it counts on. Times are GPU time.
CREATE TABLE used_day (
    day BIGINT NOT NULL,
    tenant TEXT NOT NULL,
    job TEXT NOT NULL,
    tier TEXT NOT NULL,
    used TEXT NOT NULL,
    PRIMARY KEY (day, tenant, job, tier)
);
