"""The keepers of this process: one for each ledger, and one for all block leases, made when first needed."""

from __future__ import annotations

import os
import threading

from sublet.leases.blocks.block_keeper import BlockKeeper
from sublet.leases.keeper import Keeper
from sublet.leases.warden.warden_process import ensure_warden
from sublet.ports.ledger import Ledger
from sublet.settings import Settings
from sublet.wiring import CLOCK

_lock = threading.Lock()
_keepers: dict[str, tuple[Ledger, Keeper]] = {}
_block_keepers: list[BlockKeeper] = []


def keeper(settings: Settings, ledger: Ledger) -> Keeper:
    """The keeper of this ledger. A forked process, or a ledger that was closed and opened again, gets a new
    one."""
    with _lock:
        kept = _keepers.get(settings["ledger"])
        if kept is None or kept[0] is not ledger or kept[1].pid != os.getpid():
            made = Keeper(ledger, CLOCK, before_renew=lambda: ensure_warden(settings, wait=False))
            kept = _keepers[settings["ledger"]] = (ledger, made)
        return kept[1]


def block_keeper() -> BlockKeeper:
    """The keeper of all block leases of this process, whatever their ledgers: each block knows its own."""
    with _lock:
        if not _block_keepers or _block_keepers[-1].pid != os.getpid():
            _block_keepers.append(BlockKeeper(CLOCK))
        return _block_keepers[-1]
