"""The verbs of block leases, each as one transaction. What they mean is in `blocks`."""

from __future__ import annotations

from collections.abc import Sequence

from sublet.core.leasing.block import BlockRequest, check_locator, check_times
from sublet.core.leasing.lease import Holder
from sublet.core.values import check_name
from sublet.ledger.engine import Verbs
from sublet.ledger.verbs.leasing import blocks
from sublet.ports.ledger import BlockAnswer, BlockRecord, LeaseKey


class BlockVerbs(Verbs):
    """Part of `SqlLedger`."""

    def grant_block(self, block_id: str, secret: str, request: BlockRequest, holder: Holder) -> BlockAnswer:
        check_locator(block_id)
        check_name(request.tenant, what="tenant")
        check_name(holder.host, what="host")
        return self._write(lambda tx: blocks.grant(tx, block_id, secret, request, holder), durable=True)

    def attach_block(
        self,
        block_id: str,
        secret: str,
        tenant: str,
        holder: Holder,
        *,
        ttl_us: int | None = None,
        keep_us: int | None = None,
        dead_epoch: int = 0,
    ) -> BlockAnswer:
        check_locator(block_id)
        check_name(holder.host, what="host")
        check_times(ttl_us, keep_us)
        return self._write(
            lambda tx: blocks.attach(tx, block_id, secret, tenant, holder, ttl_us, keep_us, dead_epoch),
            durable=True,
        )

    def renew_block(self, key: LeaseKey, *, patience_us: int | None = None) -> BlockAnswer:
        return self._write(lambda tx: blocks.renew(tx, key), durable=False, patience_us=patience_us)

    def check_block(self, key: LeaseKey) -> BlockAnswer:
        return self._write(lambda tx: blocks.check(tx, key), durable=False)

    def record_block(self, key: LeaseKey, done: BlockRecord) -> BlockAnswer:
        return self._write(lambda tx: blocks.record(tx, key, done), durable=True)

    def release_block(self, block_id: str, secret: str, *, patience_us: int | None = None) -> bool:
        return self._write(
            lambda tx: blocks.release(tx, block_id, secret), durable=False, patience_us=patience_us
        )

    def remove_block(
        self,
        block_id: str,
        tenant: str,
        holder: Holder,
        *,
        actor: str,
        secret: str = "",
        dead_epoch: int = 0,
    ) -> bool:
        check_locator(block_id)
        return self._write(
            lambda tx: blocks.remove(tx, block_id, tenant, holder, secret, dead_epoch, actor), durable=True
        )

    def sweep_blocks(self) -> list[str]:
        return self.engine.write(blocks.sweep, durable=True)

    def look_block(self, block_id: str, tenant: str) -> BlockAnswer:
        check_locator(block_id)
        return self._read(lambda tx: blocks.look(tx, block_id, tenant))

    def blocks(self, *, tenant: str = "", gone: bool = False, limit: int = 1000) -> list[BlockAnswer]:
        return self.engine.read(lambda tx: blocks.list_blocks(tx, tenant=tenant, gone=gone, limit=limit))

    def removed_blocks(self, block_ids: Sequence[str]) -> set[str]:
        return self.engine.read(lambda tx: blocks.removed(tx, list(block_ids)))
