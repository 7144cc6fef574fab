-- A commit is of one step or of several that follow each other, and its journal row speaks for the text it stored.
CREATE FUNCTION sublet_said(p_first text, p_second text) RETURNS text LANGUAGE sql IMMUTABLE AS $$
    SELECT encode(sha256(convert_to(length(p_first) || ':' || p_first || p_second, 'UTF8')), 'hex')
$$;

DROP FUNCTION sublet_commit(text, bigint, text, text, text, bigint, text, bigint, text, text, text);

-- Takes no pool lock: commits of different jobs do not queue behind each other. Starts no job and refuses nothing.
CREATE FUNCTION sublet_commit(
    p_id text, p_epoch bigint, p_secret_hash text, p_job text, p_key text, p_first bigint, p_step bigint, p_fingerprint text,
    p_expected bigint, p_digest text, p_cursor text, p_outcome text
) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
    l lease%ROWTYPE;
    h head%ROWTYPE;
    e effect%ROWTYPE;
    now_us bigint;
    body text;
BEGIN
    SELECT * INTO l FROM lease WHERE id = p_id FOR UPDATE;
    IF NOT FOUND OR l.secret_hash <> p_secret_hash OR l.epoch <> p_epoch OR p_epoch <= 0 THEN
        RETURN NULL;
    END IF;
    SELECT * INTO h FROM head WHERE job = p_job FOR UPDATE;
    IF NOT FOUND OR h.tenant <> l.tenant OR h.version <> p_expected OR p_first <> h.step + 1 OR p_epoch < h.epoch THEN
        RETURN NULL;
    END IF;
    SELECT * INTO e FROM effect WHERE key = p_key FOR UPDATE;
    IF FOUND AND (e.completed = 1 OR e.owner <> p_id OR e.fingerprint <> p_fingerprint) THEN
        RETURN NULL;
    END IF;
    SELECT greatest(clock_us, sublet_now()) INTO now_us FROM pool WHERE id = 1;
    IF NOT ((l.state = 'active' AND now_us < l.expires_at) OR (l.state = 'revoking' AND now_us < l.deadline_at)) THEN
        RETURN NULL;
    END IF;
    h.strand_seq := h.strand_seq + 1;
    body := format('{"cursor":"%s","digest":%s,"epoch":%s,"fingerprint":%s,"first":%s,"lease":"%s","said":"%s","step":%s,"version":%s}',
                   sublet_said('', p_cursor), to_json(p_digest), p_epoch, to_json(p_fingerprint), p_first, p_id,
                   sublet_said(p_fingerprint, p_outcome), p_step, h.version + 1);
    h.strand_hash := sublet_hash(h.strand_hash, 'job:' || p_job, h.strand_seq, now_us, 'step.committed', l.tenant, p_key, body);
    INSERT INTO journal (strand, seq, at, kind, tenant, subject, body, hash)
    VALUES ('job:' || p_job, h.strand_seq, now_us, 'step.committed', l.tenant, p_key, body, h.strand_hash);
    UPDATE head SET version = h.version + 1, step = p_step, digest = p_digest, cursor_text = p_cursor, epoch = p_epoch,
           committed_at = now_us, strand_seq = h.strand_seq, strand_hash = h.strand_hash
    WHERE job = p_job;
    INSERT INTO effect VALUES (p_key, p_fingerprint, p_job, p_id, p_epoch, 1, p_outcome, h.version + 1)
    ON CONFLICT (key) DO UPDATE SET owner = excluded.owner, epoch = excluded.epoch, completed = 1,
                                    outcome = excluded.outcome, version = excluded.version;
    UPDATE lease SET committed_at = now_us, active_at = now_us WHERE id = p_id;
    RETURN h.version + 1;
END $$;
