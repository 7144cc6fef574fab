"""The hot verbs of items on PostgreSQL: one round trip for the plain success, the common verb for everything else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from sublet.core.errors import SubletError
from sublet.core.items import Ack, Draft
from sublet.core.journal import body_text
from sublet.ledger import items
from sublet.ledger.credentials import secret_hash
from sublet.ledger.item_verbs import ItemVerbs, check_acks, check_drafts, check_pull
from sublet.ports.items import Delivery, Published
from sublet.ports.topics import queue_topic

if TYPE_CHECKING:
    from sublet.ledger.postgres import PostgresEngine
    from sublet.ports.ledger import LeaseKey


class PostgresItemVerbs(ItemVerbs):
    engine: PostgresEngine

    def publish(self, clerk: int, batch: int, drafts: Sequence[Draft]) -> Published:
        check_drafts(drafts)
        row = self.engine.call(
            "SELECT * FROM sublet_publish(%s,%s,%s::text[],%s::text[],%s::bigint[],%s::bigint[])",
            (
                clerk,
                batch,
                [draft.key for draft in drafts],
                [draft.body for draft in drafts],
                [draft.priority for draft in drafts],
                [draft.delay_us for draft in drafts],
            ),
            durable=True,
        )
        if row is None:
            return super().publish(clerk, batch, drafts)
        new, queue = row
        self.engine.ring({queue_topic(queue)})
        conflicts = (
            self.engine.read(lambda tx: items.conflicts(tx, queue, drafts)) if new < len(drafts) else ()
        )
        return Published(new=new, duplicates=len(drafts) - new - len(conflicts), conflicts=conflicts)

    def pull(self, clerk: int, most: int, visibility_us: int, holding: Sequence[int] = ()) -> list[Delivery]:
        check_pull(most, visibility_us)
        # Lost, with items in it perhaps, the common verb looks for them.
        rows = self.engine.call_rows(
            "SELECT * FROM sublet_pull(%s,%s,%s)", (clerk, most, visibility_us), durable=False, repeat=False
        )
        if rows is None or (rows and rows[0][0] is None):
            return self._write(  # type: ignore[no-any-return]
                lambda tx: items.pull(tx, clerk, most, visibility_us, holding, lost=rows is None),
                durable=False,
            )
        rows.sort(key=lambda row: (-row[6], row[8], row[0]))
        return [Delivery(row[0], row[1] or "", *row[2:8]) for row in rows]

    def extend(self, clerk: int, held: Sequence[tuple[int, int]], visibility_us: int) -> set[int]:
        kept = self.engine.call_rows(
            # Locked by number, as completing does: in another order the two would wait for each other.
            "WITH mine AS (SELECT i.id FROM item i JOIN unnest(%s::bigint[], %s::bigint[]) AS h(id, delivery) ON i.id = h.id "
            "WHERE i.state = 'leased' AND i.owner = %s AND i.delivery = h.delivery ORDER BY i.id FOR UPDATE OF i) "
            "UPDATE item SET visible_at = sublet_now() + %s FROM mine WHERE item.id = mine.id RETURNING item.id",
            ([item for item, _ in held], [delivery for _, delivery in held], clerk, visibility_us),
            durable=False,
        )
        return {item for item, _ in held} - {row[0] for row in kept or ()}

    def complete(
        self, clerk: int, acks: Sequence[Ack], *, lease: LeaseKey | None = None
    ) -> list[SubletError | None]:
        check_acks(acks)
        ordered = sorted(acks, key=lambda ack: ack.item)
        row = self.engine.call(
            "SELECT sublet_complete(%s,%s::bigint[],%s::bigint[],%s::text[],%s::bigint[],%s,%s,%s,%s)",
            (
                clerk,
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
        return super().complete(clerk, acks, lease=lease)
