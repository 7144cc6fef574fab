"""A simulated world: ledger, store, hosts with wardens, holders that train, compute and work off a queue, and an operator.

Rules of this file:
- Everything happens in one thread, in the order of a heap, by one virtual clock and one seeded generator: the same seed is the same world,
  to the last hash of the journal.
- The ledger's verbs, the core and the checkpoint store are the real ones. What is written here is what goes between them: messages, processes,
  power, and programs that behave as the runtime does (sans threads).
- After every message the checks run. A violation carries the seed; `python -m proof.deep --seed N --events M` shows it again.
"""

from __future__ import annotations

import hashlib
import heapq
import random
import struct
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from proof.deep import programs
from proof.deep.checks import Checks, Told, Violation
from proof.deep.engine import MemoryEngine
from proof.deep.mixes import Mix, calm, draw
from proof.deep.replicas import WRITE_FAULTS, SimReplica
from sublet.core.checkpoints.checkpoint import ReplicaPolicy
from sublet.core.errors import Damaged, Disconnected, SubletError
from sublet.core.leasing.lease import HOLDING, Holder, LeaseState
from sublet.core.leasing.policy import Policy
from sublet.core.leasing.tenancy import Tenant
from sublet.core.progress.effect import Committed, Steps
from sublet.core.queues.items import QueueTerms
from sublet.ledger.ledger import SqlLedger
from sublet.ledger.verbs.leasing import after_restore
from sublet.ledger.verbs.leasing.leases import renew as renew_verb
from sublet.machine import failpoints
from sublet.ports.ledger import FoundDevice, LeaseKey
from sublet.store import checkpoints
from sublet.store.checkpoints import CheckpointStore
from sublet.store.replicas.quorum import Replicas
from sublet.store.save import packing
from sublet.testing.clock import VirtualClock

SECOND = 1_000_000
GIB = 1 << 30
TENANTS = ("ada", "bob", "eve")
#: Where a connection may break, by verb: all places its transaction passes.
PLACES = {
    "commit": (
        "before_begin",
        "after_lock",
        "after_fence_check",
        "after_cas",
        "after_effect",
        "before_commit",
        "after_commit_before_reply",
    ),
    "tick": (
        "before_begin",
        "reaper_after_read",
        "reaper_before_write",
        "before_commit",
        "after_commit_before_reply",
    ),
    "publish": ("before_begin", "after_items_published", "before_commit", "after_commit_before_reply"),
    "complete": ("before_begin", "after_items_done", "before_commit", "after_commit_before_reply"),
}
ANYWHERE = ("before_begin", "before_commit", "after_commit_before_reply")
#: Where a save may be stopped for a while, or die.
SAVING = ("between_replicas", "before_manifest", "after_quorum")
#: Verbs whose answer is a promise that a crash keeps.
READS = frozenset(["look", "head", "effect", "host_view", "now", "look_token", "devices"])


class Died(BaseException):
    """The process is gone in the middle of what it did."""


@dataclass(slots=True)
class Held:
    """A lease as its holder knows it."""

    lease_id: str
    secret: str
    epoch: int
    ttl_us: int
    sent_at: int
    deadline: int  # by the holder's clock
    lost: bool = False
    revoking: bool = False

    @property
    def key(self) -> LeaseKey:
        return LeaseKey(self.lease_id, self.epoch, self.secret)

    def check(self) -> None:
        return


@dataclass(slots=True, eq=False)
class Process:
    world: World
    pid: int
    host: str
    what: str
    rate: float = 1.0
    has_pid: bool = True
    alive: bool = True
    paused_until: int = 0
    outlived_restore: bool = False
    again: Callable[[], None] | None = None  # how its supervisor starts it anew
    store: CheckpointStore | None = None

    def local(self) -> int:
        """Its own monotonic clock."""
        return int(self.world.at * self.rate)

    def holder(self) -> Holder:
        return Holder(host=self.host, pid=self.pid if self.has_pid else 0, started=1)


Thread = Generator[tuple[Any, ...], Any, None]


class SyncLedger:
    """The ledger as code that waits for its answers sees it: each call is a message that may be lost."""

    def __init__(self, world: World, process: Process) -> None:
        self._world = world
        self._process = process

    def __getattr__(self, verb: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            return self._world.message(self._process, verb, args, kwargs)

        return call


class _SeededSecrets:
    """Stands in for `secrets` where names are drawn, so that a seed draws the same ones."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance

    def token_hex(self, size: int) -> str:
        return f"{self._chance.getrandbits(size * 8):0{size * 2}x}"


class World:
    def __init__(self, seed: int, mix: Mix | None = None) -> None:
        self.seed = seed
        self.chance = random.Random(seed)
        self.mix = mix or draw(random.Random(f"mix {seed}"))
        self.names = random.Random(f"names {seed}")
        self.clock = VirtualClock()
        self.engine = MemoryEngine(self.clock, f"{self.names.getrandbits(64):016x}")
        self.ledger = SqlLedger(self.engine)
        self.at = 0  # true time, which never jumps
        self.events = 0
        self.faults: Counter[str] = Counter()
        self.done: Counter[str] = Counter()
        self.processes: dict[int, Process] = {}
        self.wardens: dict[str, Process] = {}
        self.owners: dict[str, Process] = {}  # by lease id
        self.kept: dict[str, Held] = {}
        self.cut_until: dict[str, int] = {}
        self.down_until = 0
        self.backups: list[tuple[bytes, Any, int]] = []
        self.queues: dict[str, int] = {}
        self.targets: dict[str, int] = {}
        self.stored: dict[str, int] = {}  # job: the highest version a save confirmed
        self.replicas = [SimReplica(f"sim:{i}", self.clock) for i in range(3)]
        self.policy = ReplicaPolicy(replicas=3)
        self.quiet = False
        self._heap: list[tuple[int, int, Callable[[], None]]] = []
        self._number = 0
        self._nested = False
        self._interleave: Callable[[], None] | None = None
        self._bells: dict[str, Callable[[], None]] = {}
        self.engine.heard = self._rang
        self.checks = Checks(self)
        self._populate()

    # --- small things ----------------------------------------------------------------------------------------

    def unit(self, seconds: float) -> int:
        """A duration of the workload."""
        return int(seconds * self.mix.tempo * SECOND)

    def name(self, what: str) -> str:
        self._number += 1
        return f"{what}{self._number}"

    def secret(self) -> str:
        return f"secret-{self.names.getrandbits(64):016x}"

    def chanced(self, rate: float) -> bool:
        return rate > 0 and self.chance.random() < rate

    def fault(self, kind: str) -> None:
        self.faults[kind] += 1

    def later(self, us: int, work: Callable[[], None]) -> None:
        self._number += 1
        heapq.heappush(self._heap, (self.at + max(1, us), self._number, work))

    def lives(self, lease_id: str) -> bool:
        """Whether the process that asked for this lease is alive."""
        owner = self.owners.get(lease_id)
        return owner is not None and owner.alive and owner.has_pid

    def settled(self, lease_id: str, told: Told) -> None:
        self.done[f"lease {told.reason or told.state}"] += 1

    # --- the beginning ---------------------------------------------------------------------------------------

    def _populate(self) -> None:
        chance, ledger = self.chance, self.ledger
        for number, name in enumerate(TENANTS):
            ledger.add_tenant(
                Tenant(
                    name=name,
                    max_leases=chance.choice([0, 0, 2, 4]),
                    max_vram_bytes=chance.choice([0, 0, 48 * GIB]),
                    gpu_us_per_day=chance.choice([0, 0, 0, self.unit(2000)]) if number else 0,
                ),
                actor="world",
            )
        unit = self.unit(1)
        ledger.set_policy(
            Policy(
                grace_us=15 * unit,
                idle_after_us=20 * unit,
                min_run_us=30 * unit,
                hold_cap_us=chance.choice([120, 300, 900]) * unit,
                strict_hold=chance.random() < 0.2,
                cooldown_us=20 * unit,
                claim_us=60 * unit,
                waiter_silence_us=120 * unit,
                offer_hold_us=60 * unit,
                backfill_patience_us=60 * unit,
                host_silence_us=200 * unit,
                host_gone_us=400 * unit,
                half_life_us=max(3600 * SECOND, 1000 * unit),
                waitlist_max=chance.choice([3, 20]),
                tenant_waiting_max=chance.choice([2, 10]),
            ),
            actor="world",
        )
        for host in self.hosts():
            ledger.report_host(host, self.devices_of(host))
            self.start_warden(host)
        for number in range(3):
            job = f"{TENANTS[number]}/job{number}"
            self.targets[job] = 1 << 30
            self.start_trainer(job, TENANTS[number], stored=number == 0)
        # Two that want the same job: one of them waits, or takes over.
        self.start_trainer(f"{TENANTS[1]}/job1", TENANTS[1], stored=False)
        self.queues["images"] = ledger.open_queue(
            "ada", "images", QueueTerms(visibility_us=60 * unit, tries=3, losses=6, backoff_us=5 * unit)
        ).id
        self.start(programs.publisher, "publisher", "ada")
        for _ in range(2):
            self.start(programs.worker, "worker", "ada")
        for tenant in TENANTS:
            self.start(programs.visitor, "visitor", tenant)
        self.start(programs.visitor, "name only", "bob", has_pid=False)
        self.start(programs.operator, "operator", "")
        self.checks.after("begin")

    def hosts(self) -> list[str]:
        return [f"host{i}" for i in range(self.mix.hosts)]

    def devices_of(self, host: str) -> list[FoundDevice]:
        return [
            FoundDevice(
                id=f"{host}-gpu{i}", driver="host", ordinal=i, name="sim", capacity_bytes=(16 + 8 * i) * GIB
            )
            for i in range(2)
        ]

    def process(self, host: str, what: str, *, has_pid: bool = True) -> Process:
        self._number += 1
        rate = 1.0 + self.chance.uniform(-self.mix.clocks, self.mix.clocks)
        made = Process(self, self._number, host, what, rate, has_pid)
        self.processes[made.pid] = made
        return made

    def start(
        self,
        program: Callable[[World, Process, str], Thread],
        what: str,
        tenant: str,
        *,
        has_pid: bool = True,
    ) -> None:
        process = self.process(self.chance.choice(self.hosts()), what, has_pid=has_pid)
        process.again = lambda: self.start(program, what, tenant, has_pid=has_pid)
        self.run_thread(process, program(self, process, tenant))

    def start_trainer(self, job: str, tenant: str, *, stored: bool) -> None:
        process = self.process(self.chance.choice(self.hosts()), "trainer")
        process.again = lambda: self.start_trainer(job, tenant, stored=stored)
        program = programs.saver if stored else programs.trainer
        self.run_thread(process, program(self, process, job, tenant))

    def start_warden(self, host: str) -> None:
        process = self.process(host, "warden")
        process.again = lambda: self.start_warden(host)
        self.wardens[host] = process
        self.run_thread(process, programs.warden(self, process))

    # --- threads and messages --------------------------------------------------------------------------------

    def run_thread(self, process: Process, thread: Thread) -> None:
        self.later(self.chance.randrange(1, self.unit(5)), lambda: self._drive(process, thread, None, None))

    def _drive(self, process: Process, thread: Thread, value: Any, error: BaseException | None) -> None:
        if not process.alive:
            return
        if process.paused_until > self.at:
            self.later(process.paused_until - self.at, lambda: self._drive(process, thread, value, error))
            return
        try:
            command = thread.throw(error) if error is not None else thread.send(value)
        except StopIteration:
            return
        except Died:
            self.end(process)
            return
        if command[0] == "sleep":
            self.later(int(command[1] / process.rate), lambda: self._drive(process, thread, None, None))
            return
        if command[0] == "wait":
            self._wait(process, thread, *command[1:])
            return
        _, verb, args, kwargs = command
        self.later(self._travel(), lambda: self._arrive(process, thread, verb, args, kwargs))

    def _wait(self, process: Process, thread: Thread, us: int, topic: str) -> None:
        """Until the bell of this topic rings, or so long."""
        woken: list[bool] = []

        def resume() -> None:
            if not woken:
                woken.append(True)
                self._drive(process, thread, None, None)

        self._bells[topic] = resume
        self.later(int(us / process.rate), resume)

    def _rang(self, topics: set[str]) -> None:
        for topic in sorted(topics):
            resume = self._bells.pop(topic, None)
            if resume is not None:
                self.later(self.chance.randrange(500, 20_000), resume)

    def _travel(self) -> int:
        if self.chanced(self.mix.lag):
            self.fault("lag")
            return self.chance.randrange(self.unit(0.1), self.unit(40))
        return self.chance.randrange(1_000, 50_000)

    def _arrive(
        self, process: Process, thread: Thread, verb: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        value, error = None, None
        try:
            value = self.message(process, verb, args, kwargs)
        except SubletError as e:
            error = e
        wait = self._travel() if not isinstance(error, Disconnected) else self.unit(1)
        self.later(wait, lambda: self._drive(process, thread, value, error))

    def message(self, process: Process, verb: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One verb at the ledger, with what may befall a message. The checks run behind it."""
        mix = self.mix
        self.events += 1
        if self.at < self.down_until or self.cut_until.get(process.host, 0) > self.at:
            self.done["messages into an outage"] += 1  # the outage was the fault
            raise Disconnected("the ledger does not answer")
        if self.chanced(mix.lost):
            self.fault("lost")
            raise Disconnected("no answer came")
        if verb not in READS and self.chanced(mix.broken):
            failpoints.arm(self.chance.choice(PLACES.get(verb, ANYWHERE)), self._break, nth=1)
        elif verb == "tick" and self.chance.random() < 0.3:
            failpoints.arm("reaper_after_read", self._renew_meanwhile, nth=1)
        if verb == "acquire":
            self.owners[args[0]] = process
        subject = _subject(verb, args, kwargs)
        error: SubletError | None = None
        value = None
        writes = self.engine.writes
        try:
            value = getattr(self.ledger, verb)(*args, **kwargs)
        except SubletError as e:
            error = e
        finally:
            failpoints.disarm()
        if self.engine.writes != writes:
            broke = isinstance(error, Disconnected)  # behind the commit: what it decided only the rows tell
            known = not broke and (error is None or verb == "acquire" or self._knows(args))
            self.checks.after(verb, subject, None if broke else error, known=known)
        if error is not None:
            raise error
        if self.chanced(mix.unheard):
            self.fault("unheard")
            raise Disconnected("the answer was lost")
        self._promised(verb, args, value)
        return value

    def _knows(self, args: tuple[Any, ...]) -> bool:
        """A restored ledger does not know leases that were granted after its backup."""
        key = args[0] if args else None
        return isinstance(key, LeaseKey) and bool(
            self.engine.rows("SELECT 1 FROM lease WHERE id = ?", key.lease_id)
        )

    def _break(self) -> None:
        self.fault("broken connection")
        raise Disconnected("the connection broke")

    def _renew_meanwhile(self) -> None:
        """Between a reaper's read and its lock another connection may renew (as on PostgreSQL, where renewing takes no lock of the pool)."""
        tx = self.engine.tx
        if tx is None:
            return
        for lease_id, epoch, busy, expires_at in tx.rows(
            "SELECT id, epoch, busy, expires_at FROM lease WHERE state = 'active' ORDER BY expires_at LIMIT 1"
        ):
            held = self.kept.get(lease_id)
            if held is not None and held.epoch == epoch:
                # Its transaction read the clock while the lease was alive, and commits only now.
                now, tx.now = tx.now, min(tx.now, expires_at - 1)
                renew_verb(tx, held.key, bool(busy))
                tx.now = now
                self.done["renewed between read and lock"] += 1

    def _promised(self, verb: str, args: tuple[Any, ...], value: Any) -> None:
        promises = self.checks.promises
        if (
            verb in ("acquire", "accept") and value.lease.state is LeaseState.ACTIVE and value.lease.claimed
        ) or (verb == "attend" and value.lease.state in HOLDING):
            promises.grants[value.lease.id] = value.lease.epoch
        elif verb == "commit" and isinstance(value, Committed):
            promises.commits[(args[1].job, value.version)] = args[1].key
            promises.effects[args[1].key] = (args[1].fingerprint, args[1].outcome)
            self.done["step"] += 1
        elif verb == "complete":
            for ack, refusal in zip(args[1], value, strict=True):
                if refusal is None:
                    promises.results[ack.item] = ack.result
                    self.done["item"] += 1
        elif verb == "publish":
            promises.published[args[0]] = max(args[1], promises.published.get(args[0], 0))
        elif verb == "pull":
            for delivery in value:
                self.checks.delivered(delivery.item)

    # --- what befalls processes and machines -------------------------------------------------------------------

    def end(self, process: Process) -> None:
        """It is gone; whoever looks after it starts another one after a while."""
        if not process.alive:
            return
        process.alive = False
        self.processes.pop(process.pid, None)
        if process.store is not None:
            process.store.close()
            process.store = None
        if process.again is not None:
            self.later(self.chance.randrange(self.unit(1), self.unit(60)), process.again)

    def _befall(self) -> None:
        mix, chance = self.mix, self.chance
        holders = [p for p in self.processes.values() if p.what != "warden"]
        if holders and self.chanced(mix.kill):
            self.fault("kill")
            self.end(chance.choice(holders))
        if self.processes and self.chanced(mix.pause):
            self.fault("pause")
            victim = chance.choice(list(self.processes.values()))
            victim.paused_until = self.at + chance.randrange(self.unit(10), self.unit(600))
        if self.chanced(mix.warden_dies):
            self.fault("warden killed")
            self.end(self.wardens[chance.choice(self.hosts())])
        if self.chanced(mix.partition):
            self.fault("partition")
            self.cut_until[chance.choice(self.hosts())] = self.at + chance.randrange(
                self.unit(5), self.unit(400)
            )
        if self.chanced(mix.wall_steps):
            self.fault("wall clock step")
            self.clock.step_wall(chance.randrange(-self.unit(3600), self.unit(3600)))
        if self.chanced(mix.damage):
            how = chance.choice(self.replicas).damage(chance)
            if how:
                self.fault(f"file {how}")
        if self.chanced(mix.damage / 20):
            self.fault("disk lost")
            chance.choice(self.replicas).lose_everything()
        # More often while something is not synced: that is when it hurts.
        if self.chanced(mix.ledger_dies * (1 + self.engine.open)) and not self._nested:
            self._ledger_dies()
        if mix.restore and chance.random() < 0.01:
            self.backups = [*self.backups[-2:], (self.engine.backup(), self.checks.promises.copy(), self.at)]
        if self.backups and self.chanced(mix.restore) and not self._nested:
            self._restore()

    def _ledger_dies(self) -> None:
        survivors = self.chance.randint(0, self.engine.open)
        lost = self.engine.crash(survivors)
        self.fault("ledger crash")
        self.done["commits lost in a crash"] += lost
        if self.mix.on_one_machine:
            for process in list(self.processes.values()):
                self.end(process)
            self.clock.reboot()
        self.down_until = self.at + self.chance.randrange(self.unit(0.1), self.unit(60))
        self.checks.again("a crash of the ledger")

    def _restore(self) -> None:
        """As how-to/back-up says, and then some: not everybody was stopped before."""
        copy, promises, _ = self.chance.choice(self.backups)
        self.fault("restore")
        for process in list(self.processes.values()):
            if process.what == "warden" or self.chance.random() < 0.7:
                self.end(process)
            else:
                process.outlived_restore = True
        self.engine.put_back(copy)
        self.ledger.mark_restored(actor="world")
        self.ledger.mark_current(actor="world")
        self.checks.promises = promises.copy()
        # Those it took back are gone as promised; what the backup called live was ended.
        self.checks.again("a restore")
        self.stored = {job: min(v, self.version(job)) for job, v in self.stored.items()}

    def version(self, job: str) -> int:
        found = self.engine.rows("SELECT version FROM head WHERE job = ?", job)
        return int(found[0][0]) if found else 0

    # --- the store ---------------------------------------------------------------------------------------------

    def state_of(self, job: str, step: int) -> dict[str, Any]:
        """What a job's state is at a step: known to whoever checks without having saved it."""
        seed = hashlib.sha256(f"{job} {step}".encode()).digest()
        size = 40 + struct.unpack("<H", seed[:2])[0] % 200
        return {
            "w": np.frombuffer((seed * (size // 32 + 1))[:size], np.uint8).copy(),
            "frozen": np.full(100, len(job), np.uint8),
            "step": step,
        }

    def _choose_replica_faults(self, *, reading: bool) -> None:
        for replica in self.replicas:
            replica.hits = 0
            if self.chanced(self.mix.replica):
                replica.fault = (
                    "unreachable" if reading else self.chance.choice((*WRITE_FAULTS, "unreachable"))
                )
            else:
                replica.fault = ""

    def _count_replica_faults(self) -> None:
        for replica in self.replicas:
            if replica.hits:
                self.faults[f"replica {replica.fault}"] += 1
            replica.fault = ""
            if replica.written_over:
                self.checks.fail("C2", f"written over: {replica.written_over}")

    def open_store(self, process: Process) -> CheckpointStore:
        if process.store is None:
            ledger = SyncLedger(self, process)
            process.store = CheckpointStore(Replicas(self.replicas, self.policy), lambda: ledger)  # type: ignore[arg-type, return-value]
        return process.store

    def save(self, process: Process, held: Held, job: str, step: int, version: int) -> None:
        """One real save, on replicas that may misbehave, by a process that may be stopped or die in the middle."""
        store = self.open_store(process)
        self._choose_replica_faults(reading=False)
        before = self.version(job)
        if self.chanced(self.mix.pause * 3) and not self._nested:
            place = self.chance.choice(SAVING)
            failpoints.arm(place, lambda: self._stopped_in(process), nth=1)
        key = f"{job}:{step}"
        try:
            saved = store.save(
                job,
                self.state_of(job, step),
                expected_version=version,
                lease=held,
                steps=Steps(step=step, key=key, fingerprint=f"inputs of {key}", outcome=f"outcome of {key}"),
            )
        except SubletError as e:
            # C6: a save that failed moved nothing; one whose outcome nobody heard may have.
            self.checks.ran["C6"] += 1
            if (
                self.version(job) != before
                and not isinstance(e, Disconnected)
                and self.checks.commits.get((job, before + 1)) == key
            ):
                owner = self.engine.rows("SELECT owner, epoch FROM effect WHERE key = ?", key)
                if owner == [(held.lease_id, held.epoch)]:
                    self.checks.fail("C6", f"the save of {key} failed ({e.code}) and its head moved")
            raise
        finally:
            failpoints.disarm()
            self._count_replica_faults()
        self.stored[job] = saved.version
        self.checks.promises.commits[(job, saved.version)] = key
        self.done["save"] += 1
        self._check_published(job, saved.digest)

    def _stopped_in(self, process: Process) -> None:
        """The process stands still in the middle of a save while the world goes on; or it dies there."""
        self.fault("stopped in a save")
        self._nested = True
        try:
            if self.chance.random() < 0.3:
                raise Died
            faults = [replica.fault for replica in self.replicas]
            process.paused_until = self.at + self.chance.randrange(self.unit(10), self.unit(400))
            self.run_until(process.paused_until, most=60)
            for replica, fault in zip(self.replicas, faults, strict=True):
                replica.fault = fault
        finally:
            self._nested = False
        if not process.alive:
            raise Died

    def _check_published(self, job: str, name: str) -> None:
        """C1: what the head points at was confirmed by enough replicas, all of it, and is whole there unless a disk was damaged since."""
        self.checks.ran["C1"] += 1
        having = [r for r in self.replicas if ("manifest", name) in r.confirmed]
        if len(having) < self.policy.write_quorum:
            self.checks.fail("C1", f"the head of {job} has a manifest that {len(having)} replicas confirmed")
        from sublet.core.checkpoints.checkpoint import read_manifest

        manifest = read_manifest(having[0].confirmed[("manifest", name)])
        for chunk in manifest.chunks:
            there = [r for r in self.replicas if ("pack", chunk.pack) in r.confirmed]
            whole = [
                r
                for r in there
                if packing.digest(r.confirmed[("pack", chunk.pack)][chunk.at : chunk.at + chunk.span.size])
                == chunk.digest
            ]
            if len(whole) < self.policy.write_quorum:
                self.checks.fail(
                    "C1",
                    f"{job}: chunk {chunk.digest[:12]} was confirmed by {len(there)} replicas, right by {len(whole)}",
                )

    def load(self, process: Process, job: str, step: int) -> None:
        """C3, C4: the state as it was saved, or an error if no good copy is left; never anything else."""
        self._choose_replica_faults(reading=True)
        reachable = [r for r in self.replicas if r.fault != "unreachable"]
        head = self.engine.rows("SELECT digest, step FROM head WHERE job = ?", job)[0]
        complete = self._has_all(reachable, head[0])
        self.checks.ran["C4"] += 1
        try:
            state = self.open_store(process).load(job)
        except Damaged:
            if complete:
                self.checks.fail(
                    "C4", f"{job} at step {head[1]} could not be loaded, though every part has a good copy"
                )
            self.done["load refused: no good copy"] += 1
            raise
        finally:
            self._count_replica_faults()
        expected = self.state_of(job, head[1])
        if state["step"] != head[1] or any(
            not np.array_equal(state[k], expected[k]) for k in ("w", "frozen")
        ):
            self.checks.fail("C3", f"{job} at step {head[1]} was loaded as something else")
        self.done["load"] += 1

    def _has_all(self, replicas: list[SimReplica], name: str) -> bool:
        from sublet.core.checkpoints.checkpoint import read_manifest

        for replica in replicas:
            found = replica.files.get(("manifest", name))
            if found is not None and packing.digest(found.data) == name:
                chunks = read_manifest(found.data).chunks
                return all(
                    any(
                        (pack := r.files.get(("pack", c.pack))) is not None
                        and packing.digest(pack.data[c.at : c.at + c.span.size]) == c.digest
                        for r in replicas
                    )
                    for c in chunks
                )
        return False

    # --- running -----------------------------------------------------------------------------------------------

    def run_until(self, at: int, *, most: int = 1 << 60) -> None:
        """Events up to this time, or so many."""
        for _ in range(most):
            if not self._heap or self._heap[0][0] > at:
                break
            self._step()
        self._pass_to(max(self.at, at) if not self._heap or self._heap[0][0] >= at else self.at)

    def _step(self) -> None:
        at, _, work = heapq.heappop(self._heap)
        self._pass_to(at)
        work()
        if not self.quiet:
            self._befall()

    def _pass_to(self, at: int) -> None:
        if at > self.at:
            self.clock.advance(at - self.at)
            self.at = at

    def run(self, events: int) -> None:
        with seeded(self):
            while self.events < events:
                self._step()
            self._calm_down()

    def _calm_down(self) -> None:
        """S8, T3, K3: faults stop. What was wanted comes about, who waits is served, what is over is cleared away."""
        self.quiet = True
        self.mix = calm(self.mix)
        self.cut_until.clear()
        self.down_until = 0
        # A pause that has begun goes on to its end, and a host whose warden it is may be given up meanwhile: its devices are withheld until
        # somebody has looked at them, which is what happens next.
        self.run_until(max((process.paused_until for process in self.processes.values()), default=self.at))
        for host in self.hosts():
            for device in self.devices_of(host):
                if self.engine.rows("SELECT 1 FROM device WHERE id = ? AND state <> 'ready'", device.id):
                    self.ledger.set_device(device.id, state="ready", note="", actor="world")
        for tenant in TENANTS:
            self.ledger.set_tenant(tenant, actor="world", max_leases=0, max_vram_bytes=0, gpu_us_per_day=0)
        self.checks.after("calm")
        goals = {job: self.version(job) + 3 for job in self.targets}
        items = self.done["item"]
        # Batch and spot have no hold cap, and nobody below spot makes room for it: only these have a bound.
        waiting = [
            r[0]
            for r in self.engine.rows("SELECT id FROM lease WHERE state = 'waiting' AND tier = 'interactive'")
        ]
        enough = self.at + self.unit(20_000)
        while self.at < enough:
            self.run_until(self.at + self.unit(100))
            behind = [
                job for job, goal in goals.items() if self.version(job) < goal and not self._lost_state(job)
            ]
            if not behind and self.done["item"] > items and not self._still(waiting):
                break
        else:
            self.checks.ran["S8"] += 1
            if behind:
                self.checks.fail("S8", f"faults stopped, and {behind} went no further")
            self.checks.fail(
                "T3", f"faults stopped; {self._still(waiting)} wait, {self.done['item'] - items} items done"
            )
        self.checks.ran["S8"] += 1
        self.checks.ran["T3"] += 1
        self.checks.verify("the end")
        self.checks.prove()

    def _lost_state(self, job: str) -> bool:
        """Every copy of its state was damaged: then nothing can go on, and nobody may pretend it did (C4)."""
        found = self.engine.rows("SELECT digest FROM head WHERE job = ?", job)
        return bool(found) and len(found[0][0]) == 64 and not self._has_all(self.replicas, found[0][0])

    def _still(self, waiting: list[str]) -> list[str]:
        return [
            lease
            for lease in waiting
            if self.engine.rows("SELECT 1 FROM lease WHERE id = ? AND state = 'waiting'", lease)
        ]

    def fingerprint(self) -> str:
        """One line that two runs of the same seed share: the end of the journal, and what happened on the way."""
        [(seq, digest)] = self.engine.rows("SELECT journal_seq, journal_hash FROM pool")
        rows = hashlib.sha256(
            repr(self.engine.rows("SELECT hash FROM journal ORDER BY id")).encode()
        ).hexdigest()
        return f"{seq} {digest[:16]} {rows[:16]} {self.at} {sum(self.faults.values())}"

    def close(self) -> None:
        for process in self.processes.values():
            if process.store is not None:
                process.store.close()
        self.engine.close()


def _subject(verb: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    if verb == "reserve":
        return str(kwargs["effect"])
    if verb == "acquire":
        return str(args[0])
    if verb == "renew":
        return str(args[0].lease_id)
    return str(args[1].key) if verb == "commit" else ""


@contextmanager
def seeded(world: World) -> Iterator[None]:
    """Where the store and the ledger draw names or read a clock, they draw and read the world's."""
    names = _SeededSecrets(world.names)
    before = (packing.secrets, checkpoints.secrets, checkpoints._now_us, after_restore.secrets)
    packing.secrets = checkpoints.secrets = after_restore.secrets = names  # type: ignore[assignment]
    checkpoints._now_us = lambda: world.at
    try:
        yield
    finally:
        packing.secrets, checkpoints.secrets, checkpoints._now_us, after_restore.secrets = before


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    seed: int
    mix: Mix
    events: int
    simulated_us: int
    faults: dict[str, int]
    done: dict[str, int]
    ran: dict[str, int]
    fingerprint: str
    violation: str = ""
    at_event: int = 0
    extra: dict[str, Any] = field(default_factory=dict)


def simulate(seed: int, events: int, mix: Mix | None = None) -> Outcome:
    """One world, to its end or to its first violation."""
    world = World(seed, mix)
    violation = ""
    try:
        world.run(events)
    except Violation as broken:
        violation = str(broken)
    finally:
        failpoints.disarm()
    outcome = Outcome(
        seed=seed,
        mix=replace(world.mix),
        events=world.events,
        simulated_us=world.at,
        faults=dict(sorted(world.faults.items())),
        done=dict(sorted(world.done.items())),
        ran=dict(sorted(world.checks.ran.items())),
        fingerprint=world.fingerprint(),
        violation=violation,
        at_event=world.events,
    )
    world.close()
    return outcome
