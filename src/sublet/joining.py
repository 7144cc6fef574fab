"""What users call on each host of a gang: `sublet.join()`.

Rules of this file:
- Words in, a member out. Who sits where is the ledger's to say.
- The process that joins is the member: it dies with the gang, as the holder of any lease does.
"""

from __future__ import annotations

import os
from urllib.parse import urlsplit

from sublet.core.errors import BadInput
from sublet.core.values import parse_duration
from sublet.runtime.gang import Member, key_of
from sublet.runtime.gang import join as sit_down
from sublet.runtime.members import VARIABLE, meeting_place
from sublet.settings import Settings, load_settings
from sublet.wiring import CLOCK, ensure_warden, keeper, open_ledger, open_session, processes


def join(
    ticket: str | None = None,
    *,
    address: str | None = None,
    wait: str | int | float | None = None,
    settings: Settings | None = None,
) -> Member:
    """Be a member of a gang: `with sublet.join() as member: ...`, in one process on each of its hosts.

    The ticket is `lease.ticket` of who asked for the gang; by default it is in the environment, as SUBLET_GANG. It returns when
    all members sit, with RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT set as torchrun sets them. `address` is how the others reach
    this machine, where it is not the address it reaches the ledger from. Leaving the block stands up; to die in it ends the gang.
    """
    settings = settings or load_settings()
    ticket = ticket or os.environ.get(VARIABLE, "")
    if not ticket:
        raise BadInput(
            f"there is no ticket to join with: {VARIABLE} is not set",
            remedy="pass lease.ticket of the gang, or set it in the environment of each member",
        )
    key = key_of(ticket)
    ledger = open_ledger(settings)
    if keeper(settings, ledger).keeps(key.lease_id):
        raise BadInput(
            "this process has asked for the gang, or sits in it: it is one or the other",
            remedy="start a process of its own for each member",
        )
    me = processes(settings).identify(os.getpid())
    if me is None:
        raise BadInput(f"there is no process {os.getpid()}")
    ensure_warden(settings)
    towards = address or urlsplit(settings["ledger"]).hostname or "127.0.0.1"
    member = sit_down(
        ledger,
        CLOCK,
        key,
        me,
        meeting_place(towards),
        patience_us=None if wait is None else parse_duration(wait, what="wait"),
    )
    os.environ.update(member.environment)
    member._opener = lambda held, device, watchdog_us: open_session(settings, held, device, watchdog_us)
    keeper(settings, ledger).keep(member)
    return member
