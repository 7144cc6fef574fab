"""The writer: a process of its own that hashes and writes packs, so that training does not feel it.

`python -m sublet.store.save.writer FD`. Rules of this file:
- It is started anew, not forked: a fork would copy the trainer's pages one by one in its next optimizer step,
  and would hold the pipe that should tell it that the trainer died.
- It maps the trainer's arena and only reads it. It knows replicas and nothing else: no ledger, no lease. What
  it wrote counts only when the trainer's process commits it.
- While it writes it says which replicas do not answer, whenever that changes: the trainer's user wants to
  know what a save waits for.
- It leaves with the trainer: its socket ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
from typing import Any

from sublet.core.checkpoints.checkpoint import ByteSpan, ReplicaPolicy, missing_for_quorum
from sublet.core.errors import SubletError
from sublet.machine.meanwhile import meanwhile
from sublet.ports.store import Remote, Replica
from sublet.store.arena import Arena
from sublet.store.replicas.opening import open_replica
from sublet.store.save.packing import write_pack

#: Training comes first.
NICENESS = 10
TELL_SECONDS = 0.1


def main(fd: int) -> int:
    with contextlib.suppress(OSError):
        os.nice(NICENESS)
    link = socket.socket(fileno=fd)
    arena: Arena | None = None
    replicas: dict[str, Replica] = {}
    while True:
        length = _exactly(link, 8)
        if not length:
            return 0
        message, fds, _, _ = socket.recv_fds(link, int.from_bytes(length, "little"), 1)
        while len(message) < int.from_bytes(length, "little"):
            more = link.recv(int.from_bytes(length, "little") - len(message))
            if not more:
                return 0
            message += more
        job = json.loads(message)
        if fds:
            if arena is not None:
                arena.close()
            arena = Arena(job["size"], fds[0])
        try:
            with _telling(link, replicas):
                answer = _run(job, arena, replicas)
            _send(link, {"away": _away(replicas), **answer})
        except OSError:
            return 0


def _send(link: socket.socket, message: dict[str, Any]) -> None:
    data = json.dumps(message).encode()
    link.sendall(len(data).to_bytes(8, "little") + data)


def _away(replicas: dict[str, Replica]) -> dict[str, str]:
    return {r.name: r.away for r in list(replicas.values()) if isinstance(r, Remote) and r.away}


def _telling(link: socket.socket, replicas: dict[str, Replica]) -> contextlib.AbstractContextManager[None]:
    told: dict[str, str] = {}

    def tell() -> None:
        nonlocal told
        away = _away(replicas)
        if away.keys() != told.keys():
            told = away
            _send(link, {"away": away})

    return meanwhile(TELL_SECONDS, tell)


def _run(job: dict[str, Any], arena: Arena | None, replicas: dict[str, Replica]) -> dict[str, Any]:
    assert arena is not None
    try:
        for url in job["replicas"]:
            if url not in replicas:
                replicas[url] = open_replica(url)
        policy, domains = ReplicaPolicy(**job["quorum"]["policy"]), job["quorum"]["domains"]
        packed = write_pack(
            arena.view,
            [ByteSpan(*s) for s in job["spans"]],
            [replicas[url] for url in job["replicas"]],
            lambda confirmed: not missing_for_quorum(policy, list(confirmed), domains),
        )
    except SubletError as e:
        return {"error": e.message}
    except Exception as e:  # said to the trainer: a writer that dies silently would look like a slow disk
        return {"error": f"{type(e).__name__}: {e}"}
    return {
        "pack": packed.pack,
        "digests": packed.digests,
        "places": packed.places,
        "confirmed": packed.confirmed,
        "failed": packed.failed,
        "late": packed.late,
    }


def _exactly(link: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        try:
            more = link.recv(count - len(data))
        except OSError:
            return b""
        if not more:
            return b""
        data += more
    return data


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
