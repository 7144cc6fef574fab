"""`sublet doctor` on the stores of checkpoints: each replica is used as a save would use it, from this
machine.

Rules of this file:
- A replica is checked through its port: an object is written, read back, protected from other bytes under its
  name, listed and removed; it is removed after a failure too.
- All replicas are tried at once, each for a limited time: one that hangs must not hide the others.
"""

from __future__ import annotations

import contextlib
import queue
import re
import secrets
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime

from sublet.cli.doctor.checks import Check, fail, failed, median_ms, ok, warn
from sublet.core.checkpoints.checkpoint import ReplicaPolicy
from sublet.core.checkpoints.replica_order import quorum_cost
from sublet.core.errors import NotDurable, SubletError
from sublet.ports.store import Remote, Replica
from sublet.settings import Settings
from sublet.store.buckets.failure import BucketFailed
from sublet.wiring import open_replica

TRY_SECONDS = 20.0
#: A small object written slower than this is probably written to another region.
FAR_MS = 80.0
#: Clocks that differ by less count as equal: objects are stamped in whole seconds.
CLOCK_SECONDS = 60.0
WRITES = 3


def check_stores(settings: Settings, *, seconds: float = TRY_SECONDS) -> Iterator[Check]:
    urls = [part.strip() for part in settings["store"].split(",") if part.strip()]
    if not urls:
        yield fail(
            "store",
            "no store is named",
            "set SUBLET_STORE, for example to dir:/srv/checkpoints or s3://bucket",
        )
        return
    answers: list[queue.SimpleQueue[tuple[Check, Used | None]]] = []
    for url in urls:
        box: queue.SimpleQueue[tuple[Check, Used | None]] = queue.SimpleQueue()
        answers.append(box)
        threading.Thread(target=lambda u=url, b=box: b.put(_tried(u)), daemon=True).start()
    ends = time.monotonic() + seconds
    good: list[Used] = []
    for url, box in zip(urls, answers, strict=True):
        try:
            check, replica = box.get(timeout=max(0.1, ends - time.monotonic()))
        except queue.Empty:
            check, replica = (
                fail(
                    _part(url),
                    f"it did not answer within {seconds:g} s",
                    "check its address (AWS_ENDPOINT_URL, the bucket's name), the network and the proxy "
                    "between here and there",
                ),
                None,
            )
        yield check
        if replica is not None:
            good.append(replica)
    if len(urls) > 1:
        yield _quorum(len(urls), good)


@dataclass(frozen=True, slots=True)
class Used:
    """A replica that works, and how long it took to write something small to it."""

    replica: Replica
    put_ms: float


def _part(url: str) -> str:
    return f"store {url.partition('?')[0][:60]}"


def _tried(url: str) -> tuple[Check, Used | None]:
    part = _part(url)
    replica: Replica | None = None
    try:
        replica = open_replica(url)
        replica.check()
        return _used(part, replica)
    except SubletError as e:
        remedy = e.remedy if e.remedy != type(e).remedy else _may_write()
        if replica is not None and _is_refused(e, replica) and _reads(replica):
            return fail(
                part,
                f"{e.message}. It may be read, and not written to",
                "let these credentials write, list and delete under the prefix too: they are a reader's",
            ), None
        return (fail(part, e.message, remedy) if isinstance(e, NotDurable) else failed(part, e)), None
    except OSError as e:
        remedy = (
            e.what_next(*_scheme_and_bucket(url))
            if isinstance(e, BucketFailed) and "://" in url
            else _may_write()
        )
        return fail(part, f"it cannot be read: {e.strerror or e}", remedy), None


def _scheme_and_bucket(url: str) -> tuple[str, str]:
    scheme, _, rest = url.partition("://")
    return scheme, rest.partition("/")[0].partition("@")[0]


def _is_refused(error: SubletError, replica: Replica) -> bool:
    """By what the server said: the name of a bucket, a prefix or an object may have such a number in it,
    too."""
    said = error.message.replace(replica.name, "")
    return re.search(r"\b(403|401|AccessDenied)\b|do not allow it", said) is not None


def _reads(replica: Replica) -> bool:
    with contextlib.suppress(OSError, SubletError):
        return replica.get_manifest(secrets.token_hex(32)) is None
    return False


def _may_write() -> str:
    return "check that it exists, and that these credentials may read, write, list and delete in it"


def _used(part: str, replica: Replica) -> tuple[Check, Used | None]:
    names = [secrets.token_hex(32) for _ in range(WRITES)]
    data = secrets.token_bytes(1024)
    left = iter(names)
    try:
        put = median_ms(lambda: replica.put_manifest(next(left), data), WRITES)
        got = median_ms(lambda: replica.get_manifest(names[0]), WRITES)
        used = Used(replica, put)
        if replica.get_manifest(names[0]) != data:
            return fail(
                part,
                "what was written is not what is read",
                "look for a cache or proxy between here and the store",
            ), None
        if not _refuses(replica, names[0]):
            return fail(
                part,
                "it let other bytes be written under a name that was taken: two writers could write over "
                "each other",
                "use a server that honours 'If-None-Match: *' (S3, GCS, Azure, MinIO and SeaweedFS do), or "
                "a folder: dir:PATH",
            ), None
        try:
            next(iter(replica.manifests()), None)
        except OSError as e:
            return fail(
                part,
                f"it cannot be listed: {e.strerror or e}",
                "let these credentials list under the prefix (s3:ListBucket and its like): sweeps and a "
                "rebuilt ledger need it",
            ), None
        ahead = _seconds_ahead(replica)
    finally:
        for name in names:
            with contextlib.suppress(OSError, SubletError):
                replica.remove("manifest", name)
    if replica.get_manifest(names[0]) is not None:
        return warn(
            part,
            "what was removed is still there",
            "let these credentials delete: sweeps need it, or it only grows",
        ), used
    seen = f"write {put:.1f} ms, read {got:.1f} ms, a taken name refused; fails with {replica.domain}"
    if abs(ahead) > CLOCK_SECONDS:
        return warn(
            part,
            f"{seen}; its clock is {abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'} this machine's",
            "set the clocks (chrony, systemd-timesyncd): a server refuses requests of the wrong time, "
            "usually from 15 minutes on",
        ), used
    if put > FAR_MS and not replica.near:
        return warn(
            part,
            seen,
            "it is far: keep the bucket in the region of the machines that save to it, or let others be "
            "the quorum, so that nobody waits for it",
        ), used
    return ok(part, seen), used


def _seconds_ahead(replica: Replica) -> float:
    """Its clock against ours, by the middle of the question."""
    if not isinstance(replica, Remote):
        return 0.0
    began = datetime.now(UTC)
    there = replica.clock()
    ended = datetime.now(UTC)
    return (there - (began + (ended - began) / 2)).total_seconds()


def _refuses(replica: Replica, taken: str) -> bool:
    """Other bytes under the same name."""
    try:
        replica.put_manifest(taken, secrets.token_bytes(1024))
    except NotDurable:
        return True
    return False


def _quorum(named: int, good: list[Used]) -> Check:
    policy = ReplicaPolicy(replicas=named)
    needed = policy.write_quorum or named // 2 + 1
    domains = {used.replica.domain for used in good}
    seen = f"{len(good)} of {named} replicas work, in {len(domains)} domain(s); a save needs {needed}"
    cost = quorum_cost([(used.replica.domain, int(used.put_ms * 1000)) for used in good], needed)
    if cost is not None:
        seen = f"{seen}: {cost.reason}"
    if len(good) < needed:
        return fail(
            "store quorum", seen, "mend enough of the replicas above: until then nothing can be saved"
        )
    if len(good) < named:
        return warn("store quorum", seen, "saves go on; mend the others, then 'sublet checkpoint repair'")
    if len(domains) < needed:
        return warn(
            "store quorum",
            seen,
            "put replicas where they do not fail together, and say so with '@': "
            "dir:/a@disk1,s3://bucket@zone-b",
        )
    return ok("store quorum", seen)
