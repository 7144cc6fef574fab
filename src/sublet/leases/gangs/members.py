"""The workers of a gang, one on each of its hosts, as the process that asked for them sees them.

Rules of this file:
- Members are ranks, one per host, in the order of the lease's seats. What each sees in its environment is
  what torchrun would set.
- To the lease that holds them they are one worker: armed, warned and ended together. What one of them loses
  is lost for all.
- There is no call to one of several members: a caller that wants one member's answer finds it in the list.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sublet.core.errors import BadInput, WorkerLost
from sublet.core.leasing.lease import Holder
from sublet.ports.ledger import LeaseKey
from sublet.ports.worker import Worker

#: The variable that holds the ticket for a future member.
VARIABLE = "SUBLET_GANG"
#: How long the others are waited for when one has failed. Those that live come back at once. One whose host
#: was lost comes back when the loss is reported, and its loss is the cause of what the first one raised.
AFTERWARDS_S = 15.0


def rank_environment(rank: int, world: int, address: str) -> dict[str, str]:
    """The variables torchrun sets for one process per host. `address` is rank 0's."""
    host, _, port = address.rpartition(":")
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "GROUP_RANK": str(rank),
        "GROUP_WORLD_SIZE": str(world),
        "MASTER_ADDR": host.strip("[]"),
        "MASTER_PORT": port,
    }


def meeting_place(towards: str) -> str:
    """Return this machine's address as seen from `towards`, with a port that is free now."""
    family = socket.AF_INET6 if ":" in towards else socket.AF_INET
    ours = "::1" if family is socket.AF_INET6 else "127.0.0.1"
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((towards, 9))  # nothing is sent: the kernel only picks a way
        ours = probe.getsockname()[0]
    with socket.socket(family) as listener:
        listener.bind((ours, 0))
        port = listener.getsockname()[1]
    return f"[{ours}]:{port}" if family is socket.AF_INET6 else f"{ours}:{port}"


@dataclass(frozen=True, slots=True)
class _Placed:
    worker: Worker
    environment: Mapping[str, str]  # its own part: its devices, its host


def as_member(
    environment: Mapping[str, str],
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:
    """Run the call in a member's worker with its rank in the environment."""
    os.environ.update(environment)
    return function(*args, **kwargs)


class Members:
    """Implements `ports.worker.LeaseHolder`, and calls all members at once."""

    def __init__(self, placed: Sequence[tuple[Worker, Mapping[str, str]]], *, at: str = "127.0.0.1") -> None:
        """Each with what only it sees; `at` is how the others reach the host of the first."""
        self._placed = [_Placed(worker, environment) for worker, environment in placed]
        self._at = at

    def __len__(self) -> int:
        return len(self._placed)

    @property
    def holder(self) -> Holder:
        return self._placed[0].worker.holder

    @property
    def containment(self) -> str:
        return ", ".join(sorted({p.worker.containment for p in self._placed}))

    @property
    def here(self) -> bool:
        return False

    @property
    def launches(self) -> int:
        return sum(p.worker.launches for p in self._placed)

    @property
    def ending(self) -> str:
        for p in self._placed:
            if why := p.worker.ending:
                return f"member on {p.worker.holder.host}: {why}"
        return ""

    @property
    def host_lost(self) -> str:
        for p in self._placed:
            if why := p.worker.host_lost:
                return f"member on {p.worker.holder.host}: {why}"
        return ""

    def begin(self, lease_id: str, epoch: int, environment: Mapping[str, str]) -> None:
        for p in self._placed:
            p.worker.begin(lease_id, epoch, {**environment, **p.environment})

    def arm(self, stop_us: int, kill_us: int, *, confirm: bool = False) -> None:
        for p in self._placed:
            p.worker.arm(stop_us, kill_us, confirm=confirm)

    def warn(self) -> None:
        for p in self._placed:
            p.worker.warn()

    def interrupt(self) -> None:
        for p in self._placed:
            p.worker.interrupt()

    def end(self, why: str) -> None:
        threads = [threading.Thread(target=p.worker.end, args=(why,), daemon=True) for p in self._placed]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def only(self) -> Worker:
        """Return the worker to call, if there is only one."""
        if len(self) == 1:
            return self._placed[0].worker
        raise BadInput(
            f"this lease is of {len(self)} hosts, and has a worker on each: one call has no place",
            remedy="lease.run_everywhere(function) calls it once in each, and returns a list; or lease "
            "with spread='no'",
        )

    def everywhere(
        self, key: LeaseKey, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> list[Any]:
        """Return what each returned, by rank. When one fails the others are interrupted, and its error is
        raised."""
        address = self._placed[0].worker.call(meeting_place, (self._at,), {})
        results: list[Any] = [None] * len(self)
        failed: list[BaseException] = []
        over = threading.Condition()
        left = len(self)

        def one(rank: int, placed: _Placed) -> None:
            nonlocal left
            around = {**rank_environment(rank, len(self), address), VARIABLE: key.ticket}
            try:
                results[rank] = placed.worker.call(as_member, (around, function, args, kwargs), {})
            except BaseException as e:
                failed.append(e)
            finally:
                with over:
                    left -= 1
                    over.notify_all()

        for rank, placed in enumerate(self._placed):
            threading.Thread(target=one, args=(rank, placed), name=f"sublet-rank-{rank}", daemon=True).start()
        try:
            with over:
                over.wait_for(lambda: failed or not left)
        except KeyboardInterrupt:
            self.interrupt()
            raise
        if failed:
            self.interrupt()  # whoever is in the middle of a word to the one that is gone
            with over:
                over.wait_for(lambda: not left, timeout=AFTERWARDS_S)
            # A loss says more than the errors it caused in the others.
            raise next((e for e in failed if isinstance(e, WorkerLost)), failed[0])
        return results
