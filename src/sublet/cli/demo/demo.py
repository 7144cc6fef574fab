"""`sublet demo`: a job trains while its GPU is taken away in every way there is; then the proof."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import click

from sublet.cli.demo.job import misbehave
from sublet.cli.demo.view import DemoView
from sublet.core.billing.goodput import GoodputTotals, Stretch, accounts, cost_micro, stretches
from sublet.core.errors import SubletError
from sublet.core.leasing.lease import EndReason, LeaseState
from sublet.core.leasing.options import GpuOptions
from sublet.core.progress.effect import Commit
from sublet.core.values import format_duration, format_size
from sublet.devices.opening import installed_drivers
from sublet.leases.lease import Lease
from sublet.leases.request import local_gpu
from sublet.leases.warden.warden_process import ensure_warden, warden_state
from sublet.ports.ledger import Answer, LeaseKey, Ledger
from sublet.ports.processes import Receipt
from sublet.settings import Settings, load_settings
from sublet.wiring import checkpoints, close_all, open_ledger

STEPS = 120
PACE = "0.06"
GRACE_US = 3_000_000
#: The price in the cost line, in millionths per GPU-hour.
PRICE_MICRO = 2_500_000


def _has_opencl() -> bool:
    """Installed, and its compiler knows this processor."""
    try:
        return bool(installed_drivers()["opencl"].probe("all", "demo"))
    except SubletError:
        return False


class Tour:
    def __init__(self, folder: Path) -> None:
        devices = "opencl:all" if _has_opencl() else "host:1x16GiB"
        self.environment = dict(os.environ) | {
            "SUBLET_HOME": str(folder),
            "SUBLET_LEDGER": f"sqlite:{folder}/ledger.db",
            "SUBLET_STORE": f"dir:{folder}/store",
            "SUBLET_DEVICES": devices,
            "SUBLET_NOTICES": "none",
            "SUBLET_PRELOAD": "none",
        }
        os.environ.update({k: v for k, v in self.environment.items() if k.startswith("SUBLET_")})
        self.settings: Settings = load_settings()
        self.ledger: Ledger = open_ledger(self.settings)
        self.ledger.set_policy(replace(self.ledger.policy(), grace_us=GRACE_US), actor="demo")
        self.losses: list[str] = []
        self.view = DemoView(self.ledger, "storm", STEPS)

    def say(self, mark: str, text: str, style: str = "") -> None:
        self.view.say(mark, text, style)

    def progress(self) -> None:
        step = self.step_of("storm")
        filled = step * 30 // STEPS
        self.say("trains", f"[{'#' * filled}{'.' * (30 - filled)}] step {step}/{STEPS} committed", "dim")

    # doing

    def start(self, job: str, pace: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", "sublet.cli.demo.job", job, str(STEPS), pace], env=self.environment
        )

    def lease_of(self, job: str, other_than: str = "") -> Answer:
        """Wait until the job holds a lease."""
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            for answer in self.ledger.leases():
                lease = answer.lease
                if lease.request.job == job and lease.state is LeaseState.ACTIVE and lease.id != other_than:
                    return answer
            time.sleep(0.01)
        raise SubletError(
            "the demo's job did not get its lease within 20 s", remedy="run it again, with less load"
        )

    def step_of(self, job: str) -> int:
        head = self.ledger.head(job)
        return head.step if head else 0

    def wait_for_step(self, job: str, step: int) -> None:
        deadline = time.monotonic() + 30
        while self.step_of(job) < step and time.monotonic() < deadline:
            time.sleep(0.01)


TourFault = Callable[[Tour, subprocess.Popen[bytes], Answer], None]


def revoke(reason: str) -> TourFault:
    def fault(tour: Tour, child: subprocess.Popen[bytes], held: Answer) -> None:
        tour.say("REVOKE", f"{reason}; it has {GRACE_US // 1_000_000} s to commit and leave", "loss")
        tour.losses.append("revoked")
        tour.ledger.revoke(
            held.lease.id, reason=EndReason.REVOKED, detail=reason, grace_us=GRACE_US, actor="demo"
        )
        child.wait()
        tour.say(
            "drained",
            f"exit code {child.returncode}: preempted and committed at step {tour.step_of('storm')}",
        )

    return fault


def kill(tour: Tour, child: subprocess.Popen[bytes], held: Answer) -> None:
    tour.say("KILL -9", f"process {child.pid}, no warning at all", "loss")
    tour.losses.append("killed with -9")
    at = time.monotonic()
    child.kill()
    child.wait()
    while not tour.ledger.look(held.lease.id).lease.settled_at:
        time.sleep(0.001)
    spent = (time.monotonic() - at) * 1000
    tour.say(
        "reclaimed",
        f"its worker is gone and the device was free again after {spent:.0f} ms, not after the ttl",
    )


def terminate(tour: Tour, child: subprocess.Popen[bytes], held: Answer) -> None:
    tour.say("SIGTERM", f"process {child.pid}, as a node does that is being drained", "loss")
    tour.losses.append("drained with SIGTERM")
    child.terminate()
    child.wait()
    tour.say(
        "drained", f"exit code {child.returncode}: preempted and committed at step {tour.step_of('storm')}"
    )


def lose_a_lease(tour: Tour) -> LeaseKey:
    """A real lease with a real secret, taken back: its key is what a zombie would still have in memory."""
    lease = local_gpu(GpuOptions(ttl="1m", holder="name"), settings=tour.settings).ask()
    tour.ledger.revoke(lease.id, reason=EndReason.REVOKED, detail="demo", grace_us=0, actor="demo")
    tour.ledger.tick(tour.settings["host"])
    return lease.key


def zombie_writes(tour: Tour, key: LeaseKey) -> str:
    """A holder that lost its lease tries to commit all the same."""
    head = tour.ledger.head("storm")
    assert head is not None
    try:
        tour.ledger.commit(
            key,
            Commit(
                job="storm",
                key=f"zombie:{head.step + 1}",
                step=head.step + 1,
                fingerprint="zombie",
                expected_version=head.version,
                digest="wrong",
            ),
        )
    except SubletError as refused:
        return refused.message
    return ""


def host_a_guest_that_will_not_leave(tour: Tour) -> Receipt:
    """A function in a leased worker that ignores every signal it can and leaves daemons behind. Its lease is
    revoked."""
    lease = local_gpu(GpuOptions(ttl="1m", holder="worker"), settings=tour.settings).ask()
    lease.open().alloc(64 << 20)
    tour.say("worker", "a function in a leased worker ignores SIGTERM and starts daemons", "loss")
    threading.Thread(target=_run_quietly, args=(lease,), daemon=True).start()
    time.sleep(0.3)
    tour.ledger.revoke(lease.id, reason=EndReason.REVOKED, detail="demo", grace_us=0, actor="demo")
    while not tour.ledger.look(lease.id).lease.settled_at:
        time.sleep(0.002)
    receipt = next(t.receipt for t in tour.ledger.receipts() if t.lease_id == lease.id)
    freed = f", {format_size(receipt.freed_bytes)} of device memory back" if receipt.freed_bytes else ""
    took = format_duration(receipt.duration_us)
    tour.say(
        "receipt",
        f"{receipt.ladder} after {took}: {len(receipt.pids)} processes in {receipt.containment}{freed}",
    )
    return receipt


def _run_quietly(lease: Lease) -> None:
    with contextlib.suppress(SubletError):
        lease.run(misbehave)


@click.command(
    epilog="Example:  sublet demo --keep /tmp/tour   (then look around with SUBLET_HOME=/tmp/tour "
    "sublet ps --all)"
)
@click.option("--seed", default=0, help="Where the faults strike; 0 picks one and prints it.")
@click.option("--keep", default=None, type=click.Path(path_type=Path), help="Keep the ledger in this folder.")
def demo(seed: int, keep: Path | None) -> None:
    """A tour of about a minute: trains through every kind of loss, and proves that nothing was lost.

    No GPU, no server, no root. A small network trains on a device (PoCL's, or main memory where OpenCL is not
    installed) in a leased worker. Its lease is revoked three times, it is killed once with -9 and drained
    once with SIGTERM. The result is compared, bit for bit, with a run that nobody disturbed.
    """
    seed = seed or random.SystemRandom().randrange(1, 100_000)
    with tempfile.TemporaryDirectory(prefix="sublet-demo-") as scratch:
        folder = (keep or Path(scratch)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        tour = Tour(folder)
        try:
            failed = _run(tour, seed)
        finally:
            leaving = [warden_state(tour.settings)[2]]
            leaving += [int(lock.read_text()) for lock in (folder / "run").glob("zygote-*.lock")]
            close_all()
            for pid in filter(None, leaving):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)
    if failed:
        raise SubletError(f"the demo did not prove: {', '.join(failed)}", remedy=f"sublet demo --seed {seed}")


def _run(tour: Tour, seed: int) -> list[str]:
    chance = random.Random(seed)
    tour.say("seed", f"{seed}  (sublet demo --seed {seed} repeats it)", "dim")
    ensure_warden(tour.settings)
    device = tour.ledger.devices()[0]
    tour.say("device", f"{device.id}: {device.name}, leased whole, ttl 10 s, renewed while it works")
    calm = tour.start("calm", "0")
    if calm.wait():
        raise SubletError(f"the undisturbed run failed with exit code {calm.returncode}")
    tour.say("calm run", f"{STEPS} steps, nobody disturbed it: this is the answer to reach", "good")
    stale = lose_a_lease(tour)
    with tour.view.live(), _ended_with_the_tour(tour) as start:
        refusal = _train_through(tour, chance, start, stale)
    tour.progress()
    return _prove(tour, refusal, host_a_guest_that_will_not_leave(tour))


Start = Callable[[], subprocess.Popen[bytes]]


@contextlib.contextmanager
def _ended_with_the_tour(tour: Tour) -> Iterator[Start]:
    """End the started job with the tour, however that ends."""
    children: list[subprocess.Popen[bytes]] = []

    def start() -> subprocess.Popen[bytes]:
        children.append(tour.start("storm", PACE))
        return children[-1]

    try:
        yield start
    finally:
        for child in children:
            if child.poll() is None:
                child.kill()
                child.wait()


def _train_through(tour: Tour, chance: random.Random, start: Start, stale: LeaseKey) -> str:
    faults: list[TourFault] = [
        revoke("somebody more important wants it"),
        kill,
        revoke("maintenance"),
        terminate,
        revoke("the spot market says so"),
    ]
    child = start()
    held = tour.lease_of("storm")
    for number, fault in enumerate(faults, 1):
        tour.say("granted", f"{held.lease.id} epoch {held.lease.epoch}: {held.lease.detail}")
        target = STEPS * number // (len(faults) + 1) + chance.randrange(-3, 4)
        tour.wait_for_step("storm", max(target, tour.step_of("storm") + 2))
        tour.progress()
        fault(tour, child, held)
        before = tour.step_of("storm")
        child = start()
        held = tour.lease_of("storm", other_than=held.lease.id)
        tour.say("resumes", f"a new process, from committed step {before}")
    tour.say("granted", f"{held.lease.id} epoch {held.lease.epoch}: {held.lease.detail}")
    refusal = zombie_writes(tour, stale)
    if child.wait():
        raise SubletError(f"the last run ended with exit code {child.returncode}")
    return refusal


def _prove(tour: Tour, refusal: str, receipt: Receipt) -> list[str]:
    ledger = tour.ledger
    deadline = time.monotonic() + 5
    while ledger.leases() and time.monotonic() < deadline:
        time.sleep(0.02)
    with checkpoints(settings=tour.settings) as store:
        calm, storm = store.load("calm")["state"], store.load("storm")["state"]
    proof = ledger.prove("storm")[0]
    device = ledger.devices()[0]
    verified = ledger.verify()
    found = ledger.held(job="storm")
    _, spent = accounts(stretches(found.leases, found.commits, since=0, now=found.at), _all, PRICE_MICRO)
    facts = [
        (calm == storm, "the final weights equal the undisturbed run's, to the last bit"),
        (
            proof.proven and (proof.first, proof.step) == (1, STEPS),
            f"{proof.step} steps committed, each exactly once, in {proof.commits} commits under "
            f"{proof.leases} leases",
        ),
        (bool(refusal), f"a late write under an old lease was refused: {refusal}"),
        (
            receipt.proven and receipt.ladder == "kill" and len(receipt.pids) >= 4,
            f"a worker that would not leave is gone with all it started: {len(receipt.pids)} processes, "
            "proven",
        ),
        (
            device.leases == 0 and device.free_bytes == device.capacity_bytes,
            "0 bytes are left on the device, no process of a lease lives",
        ),
        (not verified.faults, f"the journal verifies: {verified.rows} rows, every decision with its reason"),
    ]
    click.echo()
    tour.say("proof", f"after {len(tour.losses)} losses: {', '.join(tour.losses)}", "head")
    for true, what in facts:
        tour.say("  yes" if true else "  NO", what, "good" if true else "bad")
    weights = ", ".join(f"{w:.3f}" for w in struct.unpack_from("<6f", storm["network"]["weights"]))
    tour.say("", f"weights {weights}, ...", "dim")
    tour.say("", _cost(spent), "dim")
    here = "sublet" if shutil.which("sublet") else os.path.relpath(Path(sys.executable).parent / "sublet")
    click.echo(
        f"\nTry next:\n  {here} gpus\n  {here} run --vram 1GiB -- python your_script.py\n  {here} doctor"
    )
    return [what for true, what in facts if not true]


def _all(part: Stretch) -> str:
    return ""


def _cost(spent: GoodputTotals) -> str:
    held = max(1, spent.held_us)
    cost, refund = cost_micro(spent.held_us, PRICE_MICRO), cost_micro(spent.refund_us, PRICE_MICRO)
    return (
        f"{format_duration(spent.held_us)} of GPU: goodput {spent.useful_us / held:.0%}, starting and saving "
        f"{spent.overhead_us / held:.0%}, wasted {spent.wasted_us / held:.1%}; {cost / 1e6:.4f} at "
        f"{PRICE_MICRO / 1e6:.2f} an hour, {refund / 1e6:.4f} of it refunded"
    )
