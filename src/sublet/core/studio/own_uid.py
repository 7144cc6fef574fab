"""Why a tenant's worker cannot have a user of its own, and what to do about it.

Rules of this file:
- A service that is root gives every tenant a user of its own, or refuses the worker. A worker that stays root
  reads every file of the machine, so there is no lesser way (I1).
- The reason may be shown to a tenant, so it names no path. The remedy is the operator's and names what to
  change.
"""

from __future__ import annotations

from dataclasses import dataclass

_SO = "so its worker, which would have run as root, was not started, and nothing ran"


@dataclass(frozen=True, slots=True, kw_only=True)
class IsolationRefusal:
    reason: str
    remedy: str


def not_mapped(number: int) -> IsolationRefusal:
    return IsolationRefusal(
        reason=f"this container or user namespace maps no user for tenant number {number}, {_SO}",
        remedy="map at least 65536 uids and gids into it (/etc/subuid and /etc/subgid for rootless "
        "containers), or run the service as a user that is not root",
    )


def not_readable(uid: int, place: str) -> IsolationRefusal:
    return IsolationRefusal(
        reason=f"the tenant's own user cannot read the files that Python runs from, {_SO}",
        remedy=f"uid {uid} cannot read {place}: 'chmod -R go+rX' it if it may be public, or install Python "
        "and sublet anew with umask 022, or run the service as a user that is not root",
    )


def not_allowed(what: str) -> IsolationRefusal:
    return IsolationRefusal(
        reason=f"the kernel does not allow the change to the tenant's own user ({what}), {_SO}",
        remedy="give the service the capabilities CHOWN, SETUID, SETGID and SYS_ADMIN and enough processes "
        "(ulimit -u), or run it as a user that is not root",
    )


def not_prepared(what: str) -> IsolationRefusal:
    return IsolationRefusal(
        reason=f"the tenant's sandbox could not be set up ({what}), so its worker was not started, and "
        "nothing ran",
        remedy="see zygote.log in SUBLET_HOME; free disk space if there is none, then open the session again",
    )
