"""A checkpoint to a bucket against the same bytes put there by the client it uses, in parallel.

Rules of this file:
- One server for all, a process of its own on loopback, and one bucket. It may be the limit itself; then the ratio is near one, and says that
  nothing is lost on the way to it.
- The peer puts parts of the size our packs are cut into, as many at once as a save does; and again with the number that is best for it. It neither
  hashes for itself nor knows what it wrote: its bytes are not a checkpoint.
- Rounds interleave them; a figure is a median, a ratio the median of the rounds' own.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import numpy

import sublet
from bench.measure import Goal, Section, median_ratio, progress
from sublet.store.replicas.bucket_pack import PART_BYTES, UPLOADS

ROUNDS = 5
STATE_BYTES = 96 << 20
GOAL = 0.85
#: What is tried to find the peer's best.
AT_ONCE = (2, 4, 6, 12)


def run(place: Path) -> list[Section]:
    if find_spec("obstore") is None:
        return []
    with _server(place) as (name, address):
        return [_against_obstore(place, name, address)]


@contextlib.contextmanager
def _server(place: Path) -> Iterator[tuple[str, str]]:
    """SeaweedFS, which is the faster one here; moto if there is none."""
    from tests.store import servers

    made = contextlib.ExitStack()
    with made:
        try:
            yield "SeaweedFS", made.enter_context(servers.seaweed(volumes=8, volume_mb=1024)).address
        except BaseException as e:
            if type(e).__name__ != "Skipped":
                raise
            yield "moto", made.enter_context(servers.moto()).address


def _against_obstore(place: Path, server: str, address: str) -> Section:
    os.environ.update(
        SUBLET_HOME=str(place / "bucket"),
        SUBLET_LEDGER=f"sqlite:{place}/bucket/ledger.db",
        SUBLET_DEVICES="host:1x4GiB",
        SUBLET_STORE="s3://checkpoints/ours",
        AWS_ENDPOINT_URL=address,
        AWS_ACCESS_KEY_ID="AKIATEST",
        AWS_SECRET_ACCESS_KEY="canarysecretkey0123456789",
        AWS_REGION="us-east-1",
        AWS_ALLOW_HTTP="true",
    )
    rng = numpy.random.default_rng(1)
    state = {f"w{n}": rng.integers(0, 256, STATE_BYTES // 8, numpy.uint8) for n in range(8)}
    flat = numpy.concatenate(list(state.values())).tobytes()
    times: dict[str, list[float]] = {}
    with sublet.checkpoints() as store, sublet.gpu(vram="1GiB", ttl="10m") as lease:
        version = 0

        def ours() -> float:
            nonlocal version
            for array in state.values():
                array += 1  # every byte: nothing is shared with the save before
            begun = time.perf_counter()
            saved = store.save("bench", state, expected_version=version, lease=lease)
            took = time.perf_counter() - begun
            assert saved.bytes_written == STATE_BYTES
            version = saved.version
            return took

        put = _peer(flat)
        same = f"obstore.put, {UPLOADS} at once"
        subjects: dict[str, Callable[[], float]] = {"sublet": ours, same: lambda: put(UPLOADS)}
        for n in AT_ONCE:
            if n != UPLOADS:
                subjects[f"obstore.put, {n} at once"] = lambda n=n: put(n)  # type: ignore[misc]
        for number in range(ROUNDS + 1):
            progress(f"bucket, round {number} of {ROUNDS}")
            names = list(subjects)
            for name in names[number % len(names) :] + names[: number % len(names)]:
                took = subjects[name]()
                if number:  # the first warms every one of them
                    times.setdefault(name, []).append(took)
    section = Section(
        f"A checkpoint of {STATE_BYTES >> 20} MiB to S3 ({server} on loopback)",
        ["", "MB/s, median", "of it: best round"],
    )
    for name, taken in times.items():
        ordered = sorted(taken)
        section.rows.append(
            [
                name,
                f"{STATE_BYTES / 1e6 / ordered[len(ordered) // 2]:.0f}",
                f"{STATE_BYTES / 1e6 / ordered[0]:.0f}",
            ]
        )
    peers = [name for name in times if name != "sublet"]
    best = min(peers, key=lambda name: sorted(times[name])[len(times[name]) // 2])
    for peer, words in ((same, "with as many requests at once"), (best, f"at its best ({best})")):
        found = median_ratio([1 / t for t in times["sublet"]], [1 / t for t in times[peer]])
        section.goals.append(
            Goal(f"a save to a bucket, of the throughput of obstore.put {words}", found, GOAL)
        )
    section.notes.append(
        "A save hashes every byte once more than the peer (blake3; the SHA-256 for the server is both of them), and ends with an index, a manifest "
        "and a commit."
    )
    return section


def _peer(data: bytes) -> Callable[[int], float]:
    obstore, stores = import_module("obstore"), import_module("obstore.store")
    store = stores.S3Store(
        "checkpoints", prefix="peer", client_options={"allow_http": True}, checksum_algorithm="SHA256"
    )
    parts = [data[at : at + PART_BYTES] for at in range(0, len(data), PART_BYTES)]

    def put(at_once: int) -> float:
        folder = secrets.token_hex(8)
        begun = time.perf_counter()
        with ThreadPoolExecutor(at_once) as pool:
            list(
                pool.map(
                    lambda n: obstore.put(
                        store, f"{folder}/{n:06d}", parts[n], mode="create", use_multipart=False
                    ),
                    range(len(parts)),
                )
            )
        return time.perf_counter() - begun

    return put
