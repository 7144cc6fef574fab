"""What a leased worker costs: until it is ready, per call, per byte, and until nothing of it is left.

Rules of this file:
- Every figure is taken beside its peer, in turns: a cold Python that imports torch, an ipykernel, a pipe of `multiprocessing`, a
  memcpy, the kernel's own freeing of a killed process's pages.
- Workers are real ones, under real leases, with zygote, supervisor, keeper and warden.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import select
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import sublet
from bench.lesson import lesson
from bench.measure import Goal, Section, Subject, interleave, median_ratio, progress, rate_row
from sublet import wiring
from sublet.core.leasing.lease import EndReason
from sublet.functions import on_gpu
from sublet.leases.warden import warden_process
from sublet.settings import Settings, load_settings

READY_TURNS = 9
TEARDOWN_TURNS = 40
ARRAY_BYTES = 256 << 20
RESIDENT_BYTES = 1 << 30
LESSON = "import torch\nmodel = torch.nn.Linear(64, 64)\nmodel(torch.randn(8, 64)).sum().backward()\n"


def run(place: Path) -> list[Section]:
    with _home(place) as settings:
        sections = [_calls(), _arrays(), _teardown(settings)]
        if find_spec("torch") is not None:
            sections.insert(0, _ready(settings))
        return sections


@contextlib.contextmanager
def _home(place: Path) -> Iterator[Settings]:
    os.environ.update(
        SUBLET_HOME=str(place / "workers"),
        SUBLET_LEDGER=f"sqlite:{place}/workers/ledger.db",
        SUBLET_DEVICES="host:4x16GiB",
    )
    settings = load_settings()
    try:
        warden_process.ensure_warden(settings)
        progress("workers: warming the zygote ...")
        wiring.workers(settings).start().end("warmed")
        yield settings
    finally:
        on_gpu.release_warm()
        pids = [warden_process.warden_state(settings)[2]]
        pids += [int(lock.read_text()) for lock in (settings.home / "run").glob("zygote-*.lock")]
        wiring.close_all()
        for pid in filter(None, pids):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)


# --- ready ---------------------------------------------------------------------------------------------------


def _cold() -> None:
    subprocess.run([sys.executable, "-c", LESSON], check=True)


def _kernel() -> None:
    from jupyter_client.manager import start_new_kernel

    manager, client = start_new_kernel(stderr=subprocess.DEVNULL)
    client.stop_channels()
    manager.shutdown_kernel(now=True)


def _leased() -> Any:
    lease = sublet.gpu(vram="1GiB", ttl="1m", holder="worker").ask()
    lease.run(lesson)
    return lease


def _ready(settings: Settings) -> Section:
    progress("workers: ready ...")
    subjects: dict[str, Callable[[], Any]] = {"leased worker": _leased, "python, import torch": _cold}
    if find_spec("ipykernel") is not None and find_spec("jupyter_client") is not None:
        subjects["ipykernel"] = _kernel
    taken: dict[str, list[float]] = {name: [] for name in subjects}
    for _ in range(READY_TURNS):
        for name, subject in subjects.items():
            time.sleep(0.5)  # whatever the last one left to its background
            begun = time.perf_counter()
            left = subject()
            taken[name].append((time.perf_counter() - begun) * 1000)
            if left is not None:
                left.release()
    section = Section(
        "From nothing to a first forward and backward pass, ms", ["", "median", "range", "ours is"]
    )
    ours = taken["leased worker"]
    wanted = {"python, import torch": 20.0, "ipykernel": 8.0}
    for name, times in taken.items():
        ratio = median_ratio(times, ours)
        section.rows.append(
            [
                name,
                f"{statistics.median(times):.0f}",
                f"{min(times):.0f}-{max(times):.0f}",
                f"{ratio:.1f} x faster",
            ]
        )
        if name in wanted:
            section.goals.append(Goal(f"worker ready, against {name}", ratio, wanted[name]))
    section.notes.append("ipykernel: start and first answer only, no torch in it")
    section.data = dict(taken)
    return section


# --- calls ---------------------------------------------------------------------------------------------------


def _nothing() -> None:
    return None


def _echo(pipe: Connection) -> None:
    with contextlib.suppress(EOFError):
        while True:
            pipe.send(pipe.recv())


def _calls() -> Section:
    progress("workers: calls ...")
    here, there = multiprocessing.get_context("spawn").Pipe()
    echo = multiprocessing.get_context("spawn").Process(target=_echo, args=(there,), daemon=True)
    echo.start()
    there.close()
    call = sublet.on_gpu(vram="1GiB", ttl="1m")(_nothing)
    many = sublet.on_gpu(vram="1GiB", ttl="1m", batch=32)(_identity)
    items = list(range(32))

    def trip() -> None:
        here.send(None)
        here.recv()

    subjects = [
        Subject("on_gpu, empty call", lambda: call(), 1),
        Subject("on_gpu, map in batches of 32", lambda: list(many.map(items)) and None, 32),
        Subject("multiprocessing pipe", trip, 1),
    ]
    rates = interleave(subjects)
    here.close()
    echo.terminate()
    echo.join()
    section = Section("Calls, round trips per second", ["", "median", "range", "to the pipe", ""])
    for subject in subjects:
        section.rows.append(rate_row(subject.name, rates, ["multiprocessing pipe"], ""))
    section.goals.append(
        Goal(
            "empty on_gpu call, pipe round trips it costs",
            median_ratio(rates["multiprocessing pipe"], rates["on_gpu, empty call"]),
            2.0,
            at_most=True,
        )
    )
    section.data = dict(rates)
    return section


def _identity(value: Any) -> Any:
    return value


# --- arrays --------------------------------------------------------------------------------------------------


def _size(array: Any) -> int:
    return int(array.nbytes)


_kept: dict[str, Any] = {}


def _give() -> Any:
    import numpy

    if "array" not in _kept:
        _kept["array"] = numpy.ones(ARRAY_BYTES, dtype=numpy.uint8)
    return _kept["array"]


def _arrays() -> Section:
    import numpy

    progress("workers: arrays ...")
    source = numpy.ones(ARRAY_BYTES, dtype=numpy.uint8)
    target = numpy.zeros(ARRAY_BYTES, dtype=numpy.uint8)
    into = sublet.on_gpu(vram="1GiB", ttl="1m")(_size)
    out = sublet.on_gpu(vram="1GiB", ttl="1m")(_give)

    def copy() -> None:
        numpy.copyto(target, source)

    subjects = [
        Subject("in", lambda: into(source) and None, 1, warm_cycles=3),
        Subject("out", lambda: out().nbytes and None, 1, warm_cycles=3),
        Subject("memcpy", copy, 1, warm_cycles=3),
    ]
    rates = interleave(subjects)
    section = Section("A 256 MB array, times per second", ["", "median", "range", "to memcpy", ""])
    for subject in subjects:
        section.rows.append(rate_row(subject.name, rates, ["memcpy"], ""))
    for way in ("in", "out"):
        section.goals.append(
            Goal(
                f"256 MB {way}, memcpys it costs",
                median_ratio(rates["memcpy"], rates[way]),
                1.5,
                at_most=True,
            )
        )
    section.data = dict(rates)
    return section


# --- teardown ------------------------------------------------------------------------------------------------


def _hold_memory() -> int:
    _kept["resident"] = bytearray(RESIDENT_BYTES)
    return len(_kept["resident"])


def _freeing() -> float:
    """What the kernel needs to end a process with as much memory, in ms."""
    code = f"b = bytearray({RESIDENT_BYTES}); print(len(b), flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        fd = os.pidfd_open(child.pid)
        begun = time.perf_counter()
        child.kill()
        select.select([fd], [], [])
        taken = time.perf_counter() - begun
        os.close(fd)
    return taken * 1000


def _torn_down(settings: Settings) -> float:
    """From the revoke's answer to the proof in the ledger, in ms."""
    ledger = wiring.open_ledger(settings)
    lease = sublet.gpu(vram="1GiB", ttl="1m", holder="worker").ask()
    lease.run(_hold_memory)
    ledger.revoke(lease.id, reason=EndReason.REVOKED, detail="bench", grace_us=0, actor="bench")
    begun = time.perf_counter()
    while not ledger.look(lease.id).lease.settled_at:
        time.sleep(0.003)  # looking costs a core, of which there may be two
    return (time.perf_counter() - begun) * 1000


def _teardown(settings: Settings) -> Section:
    progress("workers: teardown ...")
    freeing: list[float] = []
    proven: list[float] = []
    for _ in range(TEARDOWN_TURNS):
        freeing.append(_freeing())
        proven.append(_torn_down(settings))
    receipts = wiring.open_ledger(settings).receipts(limit=TEARDOWN_TURNS)
    section = Section("Revoke to proven teardown of a 1 GB worker, ms", ["", "median", "p99"])
    for name, times in (("proven teardown", proven), ("the kernel frees 1 GB", freeing)):
        section.rows.append([name, f"{statistics.median(times):.1f}", f"{_p99(times):.1f}"])
    section.goals.append(
        Goal("teardown p99 beyond page freeing", _p99(proven) - _p99(freeing), 100, "ms", at_most=True)
    )
    section.notes.append(
        f"{sum(t.receipt.proven for t in receipts)} of {len(receipts)} proven; ladder {sorted({t.receipt.ladder for t in receipts})}"
    )
    section.data = {"proven": proven, "freeing": freeing}
    return section


def _p99(times: list[float]) -> float:
    return sorted(times)[min(len(times) - 1, round(0.99 * len(times)))]
