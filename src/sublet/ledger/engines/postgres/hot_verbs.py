"""The hot verbs on PostgreSQL: a success takes one call of a function in `schema/postgres.sql`, everything
else falls through to the verb written once for both engines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from sublet.core.errors import SubletError
from sublet.core.journal.chain import body_text
from sublet.core.leasing.lease import Holder, Request
from sublet.core.leasing.stamp import LedgerState
from sublet.core.progress.effect import AlreadyCommitted, Commit, Committed
from sublet.core.queues.items import Ack, NewItem
from sublet.core.studio.session import is_id
from sublet.core.studio.token import Token
from sublet.core.values import check_job
from sublet.ledger.engine import raised
from sublet.ledger.engines.postgres.connection import LedgerConnection
from sublet.ledger.engines.postgres.transaction import placed
from sublet.ledger.ledger import SqlLedger, check_request
from sublet.ledger.rows import SESSION_AND_LEASE, lease_of, of_table
from sublet.ledger.tx import Row
from sublet.ledger.verbs.leasing.credentials import secret_hash
from sublet.ledger.verbs.queues import items
from sublet.ledger.verbs.queues.item_ledger import check_acks, check_drafts, check_pull
from sublet.ledger.verbs.studio import sessions, tokens
from sublet.ports.bell import host_topic, queue_topic
from sublet.ports.items import Delivery, Published
from sublet.ports.ledger import Answer, LeaseKey, SessionAnswer

if TYPE_CHECKING:
    from sublet.ledger.engines.postgres.engine import PostgresEngine


def _with_time(sql: str) -> str:
    """Add the time as a last column: never earlier than the ledger's own, because a standby's clock may be
    behind."""
    return placed(sql.replace(" FROM ", ", (SELECT greatest(clock_us, sublet_now()) FROM pool) FROM ", 1))


_LOOK_SESSION = _with_time(sessions.LOOK)
#: A session is only found with the tenant of the token that is shown (T1).
_LOOK_VISITS = _with_time(
    f"SELECT {SESSION_AND_LEASE}, {of_table('t', tokens.COLUMNS)}, k.session "
    "FROM unnest(?::text[], ?::text[]) AS k(token, session) "
    "JOIN token t ON t.id = k.token LEFT JOIN studio_session s ON s.id = k.session AND s.tenant = t.tenant "
    "LEFT JOIN lease l ON l.id = s.lease_id"
)
_TOKEN_WIDTH = len(tokens.COLUMNS.split(","))


class PostgresLedger(SqlLedger):
    """The verbs of `SqlLedger`, with the hot ones tried as one function call first."""

    engine: PostgresEngine

    def acquire(self, lease_id: str, secret: str, request: Request, holder: Holder) -> Answer:
        check_request(lease_id, request, holder)
        if request.count == 1:
            row = self.engine.call(
                "SELECT * FROM sublet_acquire(%s,%s,%s,%s,%s,%s,%s,%s,%s,%s,%s,%s,%s,%s,%s,%s,%s)",
                (
                    lease_id,
                    secret_hash(secret),
                    request.tenant,
                    request.job,
                    request.tier.value,
                    request.exclusivity.value,
                    request.vram_bytes,
                    request.least_bytes,
                    int(request.wants_offers),
                    request.ttl_us,
                    request.wait_us,
                    request.hold_cap_us,
                    request.host,
                    holder.host,
                    holder.pid,
                    holder.started,
                    self.engine.highest_epoch(),
                ),
                # Every grant locks the pool's row. It is let go before the disk is waited for: then the next
                # one is granted meanwhile, and one flush makes many grants durable.
                durable=False,
            )
            if row is not None and self._outlives_a_crash(lease := lease_of(row)):
                self.engine.confirmed(LedgerState(lease.epoch, 0, 0))
                self.engine.ring({host_topic(holder.host)})
                return Answer(lease=lease, at=lease.granted_at)
        return super().acquire(lease_id, secret, request, holder)

    def renew(self, key: LeaseKey, *, busy: bool = True, patience_us: int | None = None) -> Answer:
        row = self.engine.call(
            "SELECT (r.renewed).*, r.answered_at FROM sublet_renew(%s,%s,%s,%s) AS r",
            (key.lease_id, key.epoch, secret_hash(key.secret), int(busy)),
            durable=False,
            patience_us=patience_us,
        )
        if row is not None:
            return Answer(lease=lease_of(row), at=row[-1])
        return super().renew(key, busy=busy, patience_us=patience_us)

    def renew_many(
        self, keys: Sequence[tuple[LeaseKey, bool]], *, patience_us: int | None = None
    ) -> list[Answer | SubletError]:
        ordered = sorted(keys, key=lambda k: k[0].lease_id)
        wanted = [(key.lease_id, key.epoch, secret_hash(key.secret), int(busy)) for key, busy in ordered]

        def run(connection: LedgerConnection) -> list[Row]:
            ids, epochs, hashes, busies = (list(column) for column in zip(*wanted, strict=True))
            return connection.execute(
                "SELECT (r.renewed).*, r.answered_at "
                "FROM unnest(%s::text[], %s::bigint[], %s::text[], %s::bigint[]) "
                "AS k(id, epoch, hash, busy), "
                "LATERAL sublet_renew(k.id, k.epoch, k.hash, k.busy) AS r",
                (ids, epochs, hashes, busies),
            ).fetchall()

        if not wanted:
            return []
        renewed = {
            row[0]: Answer(lease=lease_of(row), at=row[-1])
            for row in self.engine.attempt(False, run, patience_us)
        }
        others = [pair for pair in keys if pair[0].lease_id not in renewed]
        told = iter(super().renew_many(others, patience_us=patience_us) if others else ())
        return [renewed.get(key.lease_id) or next(told) for key, _ in keys]

    def release(
        self, lease_id: str, secret: str, *, torn_down: bool = True, patience_us: int | None = None
    ) -> bool:
        if not torn_down:
            return super().release(lease_id, secret, torn_down=False, patience_us=patience_us)
        row = self.engine.call(
            "SELECT sublet_release(%s,%s)",
            (lease_id, secret_hash(secret)),
            durable=False,
            patience_us=patience_us,
        )
        if row is not None and row[0]:
            return True
        return super().release(lease_id, secret, patience_us=patience_us)

    def look_session(self, session_id: str, tenant: str, *, explain: bool = False) -> SessionAnswer:
        """Called for each request of the studio: one round trip, without a transaction around it."""
        if explain:
            return super().look_session(session_id, tenant, explain=True)
        row = (
            self.engine.call(_LOOK_SESSION, (session_id, tenant), durable=False)
            if is_id(session_id)
            else None
        )
        return sessions.answer_of(row, row[-1]) if row is not None else raised(sessions.unknown(session_id))

    def token_and_session(
        self, keys: Sequence[tuple[str, str]]
    ) -> dict[tuple[str, str], tuple[Token, SessionAnswer | None]]:
        if not keys:
            return {}
        shown = [token_id for token_id, _ in keys]
        named = [session_id if is_id(session_id) else "" for _, session_id in keys]
        rows = self.engine.call_rows(_LOOK_VISITS, (shown, named), durable=False)
        found: dict[tuple[str, str], tuple[Token, SessionAnswer | None]] = {}
        for row in rows or ():
            token = tokens.of_row(row[-2 - _TOKEN_WIDTH : -2])
            session = sessions.answer_of(row, row[-1]) if row[0] is not None else None
            found[(token.id, row[-2])] = (token, session)
        asked = zip(keys, zip(shown, named, strict=True), strict=True)
        return {key: found[clean] for key, clean in asked if clean in found}

    def commit(self, key: LeaseKey, commit: Commit) -> Committed | AlreadyCommitted:
        check_job(commit.job)
        if commit.effects:
            return super().commit(key, commit)
        row = self.engine.call(
            "SELECT sublet_commit(%s,%s,%s,%s,%s,%s,%s,%s,%s,%s,%s,%s,%s,%s)",
            (
                key.lease_id,
                key.epoch,
                secret_hash(key.secret),
                commit.job,
                commit.key,
                commit.begins,
                commit.step,
                commit.fingerprint,
                commit.expected_version,
                commit.digest,
                commit.cursor,
                commit.outcome,
                commit.new_bytes,
                commit.whole_bytes,
            ),
            durable=True,
        )
        if row is not None and row[0]:
            return Committed(int(row[0]))
        return super().commit(key, commit)

    # items

    def publish(self, consumer: int, batch: int, drafts: Sequence[NewItem]) -> Published:
        check_drafts(drafts)
        row = self.engine.call(
            "SELECT * FROM sublet_publish(%s,%s,%s::text[],%s::text[],%s::bigint[],%s::bigint[])",
            (
                consumer,
                batch,
                [draft.key for draft in drafts],
                [draft.body for draft in drafts],
                [draft.priority for draft in drafts],
                [draft.delay_us for draft in drafts],
            ),
            durable=True,
        )
        if row is None:
            return super().publish(consumer, batch, drafts)
        new, queue = row
        self.engine.ring({queue_topic(queue)})
        conflicts = (
            self.engine.read(lambda tx: items.conflicts(tx, queue, drafts)) if new < len(drafts) else ()
        )
        return Published(new=new, duplicates=len(drafts) - new - len(conflicts), conflicts=conflicts)

    def pull(
        self, consumer: int, most: int, visibility_us: int, holding: Sequence[int] = ()
    ) -> list[Delivery]:
        check_pull(most, visibility_us)
        # Lost, with items in it perhaps, the common verb looks for them.
        rows = self.engine.call_rows(
            "SELECT * FROM sublet_pull(%s,%s,%s)",
            (consumer, most, visibility_us),
            durable=False,
            repeat=False,
        )
        if rows is None or (rows and rows[0][0] is None):
            return self._write(
                lambda tx: items.pull(tx, consumer, most, visibility_us, holding, lost=rows is None),
                durable=False,
            )
        rows.sort(key=lambda row: (-row[6], row[8], row[0]))
        return [Delivery(row[0], row[1] or "", *row[2:8]) for row in rows]

    def extend(self, consumer: int, held: Sequence[tuple[int, int]], visibility_us: int) -> set[int]:
        kept = self.engine.call_rows(
            # Locked by number, as completing does: in another order the two would wait for each other.
            "WITH mine AS (SELECT i.id FROM item i "
            "JOIN unnest(%s::bigint[], %s::bigint[]) AS h(id, delivery) ON i.id = h.id "
            "WHERE i.state = 'leased' AND i.owner = %s AND i.delivery = h.delivery "
            "ORDER BY i.id FOR UPDATE OF i) "
            "UPDATE item SET visible_at = sublet_now() + %s FROM mine "
            "WHERE item.id = mine.id RETURNING item.id",
            ([item for item, _ in held], [delivery for _, delivery in held], consumer, visibility_us),
            durable=False,
        )
        return {item for item, _ in held} - {row[0] for row in kept or ()}

    def complete(
        self, consumer: int, acks: Sequence[Ack], *, lease: LeaseKey | None = None
    ) -> list[SubletError | None]:
        check_acks(acks)
        ordered = sorted(acks, key=lambda ack: ack.item)
        row = self.engine.call(
            "SELECT sublet_complete(%s,%s::bigint[],%s::bigint[],%s::text[],%s::bigint[],%s,%s,%s,%s)",
            (
                consumer,
                [ack.item for ack in ordered],
                [ack.delivery for ack in ordered],
                [ack.result for ack in ordered],
                [ack.work_us for ack in ordered],
                body_text(items.told_done(ordered, lease)),
                lease.lease_id if lease else "",
                lease.epoch if lease else 0,
                secret_hash(lease.secret) if lease else "",
            ),
            durable=True,
        )
        if row is not None and row[0]:
            return [None] * len(acks)
        return super().complete(consumer, acks, lease=lease)
