"""What users call on each host of a gang: `sublet.join()`.

Rules of this file:
- It checks the arguments and returns a member. The ledger decides which member has which seat.
- The process that joins is the member: it dies with the gang, as the holder of any lease does.
"""

from __future__ import annotations

import functools
import os
from urllib.parse import urlsplit

from sublet.core.errors import BadInput
from sublet.core.values import parse_duration
from sublet.leases.gangs.member import Member, key_of
from sublet.leases.gangs.member import join as sit_down
from sublet.leases.gangs.members import VARIABLE, meeting_place
from sublet.leases.keepers import keeper
from sublet.leases.sessions import open_session
from sublet.leases.warden.warden_process import ensure_warden
from sublet.settings import Settings, load_settings, variable
from sublet.wiring import CLOCK, open_ledger, processes


def join(
    ticket: str | None = None,
    *,
    address: str | None = None,
    wait: str | int | float | None = None,
    settings: Settings | None = None,
) -> Member:
    """Be a member of a gang: `with sublet.join() as member: ...`, in one process on each of its hosts.

    The ticket is `lease.ticket` of who asked for the gang; by default it is in the environment, as
    SUBLET_GANG. It returns when all members sit, with RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and
    MASTER_PORT set as torchrun sets them. `address` is how the others reach this machine, where it is not the
    address it reaches the ledger from. Leaving the block stands up; to die in it ends the gang.
    """
    settings = settings or load_settings()
    ticket = ticket or variable("GANG")
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
        opener=functools.partial(open_session, settings),
    )
    os.environ.update(member.environment)
    keeper(settings, ledger).keep(member)
    return member
