"""The agent: sublet's side of one Ray node. It keeps the node's warden, starts leased workers and commands,
and passes calls and output on.

Rules of this file:
- It runs as a detached actor, one per node and ledger, and Ray restarts it when it dies. A worker's
  supervisor ends the worker when the agent is gone, and at the worker's own deadline in any case: nothing
  here has to work for that.
- The warden is a process of its own and not the agent's child: it outlives the agent, and proves what became
  of its workers.
- The node's own settings (the environment of its raylet, its sublet.toml) decide its name, devices and home.
- Calls are sealed: nothing that a user sent, or a worker answered, is opened here.
- Deadlines arrive on this host's clock; the sender has converted them, to its own disadvantage.
- The workers of a driver that is gone are ended: Ray knows which jobs are over.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import platform
import queue
import secrets
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from sublet.core.errors import SubletError, WorkerLost
from sublet.core.notice import Notice
from sublet.leases.warden.warden_process import ensure_warden
from sublet.placement.node_command import NodeCommand, clear_leftovers
from sublet.ports.ledger import LeaseKey
from sublet.ports.worker import Callee, LeaseHolder, Part, Worker, Workers
from sublet.processes.sandbox.tenant_numbers import TenantNumbers
from sublet.settings import Settings, load_settings
from sublet.wiring import CLOCK, tenant_workers, workers

#: How long an answer without news takes: it is a sign of life to the caller.
NEWS_SECONDS = 2.0
#: How long a worker lives that nobody has armed yet.
UNARMED_US = 120_000_000
WATCH_SECONDS = 1.0
#: How much output may wait to be fetched. Beyond it, the worker waits when it prints.
UNFETCHED_BYTES = 32 << 20
#: Smaller buffers are not worth a place of their own in Ray's object store.
BESIDE_BYTES = 64 << 10

#: Why a worker ended, for callers that ask after the agent was restarted.
GONE = "its agent does not know it any more"

#: Variables that Ray sets in each of its processes.
RAYS_OWN = ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "PYTHONBREAKPOINT", "GRPC_POLL_STRATEGY")

#: One event of a call: its kind, and then what belongs to it.
Event = tuple[Any, ...]
T = TypeVar("T")


def carried(parts: Sequence[Part]) -> list[Any]:
    """Prepare parts for Ray: large ones travel beside the pickle, and are mapped instead of copied at the
    other end."""
    return [
        pickle.PickleBuffer(part) if memoryview(part).nbytes >= BESIDE_BYTES else bytes(part)
        for part in parts
    ]


def node_settings(ledger: str) -> Settings:
    """The node's own settings, with the asker's ledger where the node names none."""
    own = load_settings(placement="local")
    return own if own.origin("ledger") != "default" else load_settings(placement="local", ledger=ledger)


class _RunningCall:
    """A running call and its events, for whoever fetches them. Implements `ports.worker.CallSink`."""

    interrupted = False

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._news = asyncio.Event()
        self._room = threading.Condition()
        self._events: list[tuple[Event, int]] = []
        self._bytes = 0
        self._forgotten = 0
        self._left = False
        self.replies: queue.SimpleQueue[tuple[bool, list[Part]]] = queue.SimpleQueue()

    def text(self, stream: str, text: str) -> None:
        self.say(("text", stream, text), len(text))

    def show(self, display: bytes) -> None:
        self.say(("show", bytes(display)), len(display))

    def ask(self, head: Mapping[str, Any], parts: Sequence[memoryview]) -> tuple[bool, Sequence[Part]]:
        self.say(("ask", dict(head), carried(parts)), 0)
        return self.replies.get()

    def over(self, event: Event) -> None:
        self.say(event, 0)

    def leave(self) -> None:
        """Stop waiting for a fetch, because nobody fetches any more."""
        with self._room:
            self._left = True
            self._room.notify_all()
        self.replies.put((False, []))

    def say(self, event: Event, size: int) -> None:
        with self._room:
            while self._bytes > UNFETCHED_BYTES and not self._left:
                self._room.wait()
            self._events.append((event, size))
            self._bytes += size
        with contextlib.suppress(RuntimeError):  # the loop is closed: so is everything
            self._loop.call_soon_threadsafe(self._news.set)

    async def fetch(self, seen: int) -> tuple[int, list[Event]]:
        """Return the events after the first `seen`, and how many were dropped. Only what was seen is dropped,
        because an answer may get lost."""
        with self._room:
            known = seen - self._forgotten
            if known > 0:
                self._bytes -= sum(size for _, size in self._events[:known])
                del self._events[:known]
                self._forgotten = seen
                self._room.notify_all()
        if not self._events:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), NEWS_SECONDS)
        self._news.clear()
        with self._room:
            return self._forgotten, [event for event, _ in self._events]


class _Hosted:
    """A worker or a command, and its owner."""

    def __init__(self, made: Worker | NodeCommand, job: str) -> None:
        self.worker = None if isinstance(made, NodeCommand) else made
        self.command = made if isinstance(made, NodeCommand) else None
        self.holder: LeaseHolder = made.command if isinstance(made, NodeCommand) else made
        self.job = job
        self.call: _RunningCall | None = None
        self.serial = 0
        self.armed = 0

    @property
    def ending(self) -> str:
        """Why it ended. That a command has left is only said after everything it wrote."""
        return "" if self.command is not None else self.holder.ending

    def end(self, why: str) -> None:
        if self.call is not None:
            self.call.leave()
        (self.command or self.holder).end(why)


class Agent:
    def __init__(self, ledger: str) -> None:
        self._settings = node_settings(ledger)
        self._workers = workers(self._settings)
        self._numbers = TenantNumbers(self._settings.home / "tenant-numbers.json")
        clear_leftovers(self._settings.home)
        self._hosted: dict[str, _Hosted] = {}
        threading.Thread(target=self._watch, name="sublet-agent-watches", daemon=True).start()

    # the node

    async def facts(self) -> dict[str, Any]:
        """Who this is, once its warden has reported the devices."""
        await self._aside(lambda: ensure_warden(self._settings, for_pid=os.getpid()))
        return {
            "host": self._settings["host"],
            "devices": self._settings["devices"],
            "python": platform.python_version(),
            "pid": os.getpid(),
            "home": str(self._settings.home),
        }

    def _watch(self) -> None:
        with contextlib.suppress(SubletError):
            self._workers.warm()
        while True:
            with contextlib.suppress(SubletError, OSError):
                ensure_warden(self._settings, wait=False, for_pid=os.getpid())
            over = _jobs_over()
            for number, hosted in list(self._hosted.items()):
                if hosted.job in over:
                    self._abandoned(number, hosted)
            time.sleep(WATCH_SECONDS)

    def _abandoned(self, number: str, hosted: _Hosted) -> None:
        """End a worker, which nobody can use any more. A command may have something to save: it is warned,
        and has its grace."""
        if hosted.command is not None:
            if hosted.call is not None:
                hosted.call.leave()
            hosted.command.abandon()
            if not hosted.command.command.ending:
                return
        self._end(number, "the process that asked for it is gone")

    @staticmethod
    async def _aside(work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(None, work)

    # workers

    async def start(self, job: str, tenant: str = "") -> dict[str, Any]:
        worker = await self._aside(lambda: self._workers_of(tenant).start())
        return self._started(secrets.token_hex(8), _Hosted(worker, job), tenant)

    def _workers_of(self, tenant: str) -> Workers:
        """A studio's tenants are kept apart on each node as on the studio's own machine."""
        return tenant_workers(self._settings, self._numbers.of(tenant)) if tenant else self._workers

    async def begin(self, number: str, lease_id: str, epoch: int, environment: dict[str, str]) -> str:
        """Begin a tenant's worker, which sees nothing of whoever asked for it. Returns what went wrong, or
        ''."""
        if (hosted := self._hosted.get(number)) is None:
            return GONE
        try:
            await self._aside(partial(hosted.holder.begin, lease_id, epoch, environment))
        except SubletError as e:
            return e.message
        return ""

    def _started(self, number: str, hosted: _Hosted, tenant: str = "") -> dict[str, Any]:
        held = hosted.holder
        now_us = CLOCK.monotonic_us()
        held.arm(now_us + UNARMED_US, now_us + UNARMED_US)
        self._hosted[number] = hosted
        holder = held.holder
        return {
            "number": number,
            "host": holder.host,
            "pid": holder.pid,
            "started": holder.started,
            "containment": held.containment,
            "tenant": tenant,
            "now_us": CLOCK.monotonic_us(),
        }

    async def arm(self, number: str, turn: int, stop_us: int, kill_us: int, confirm: bool) -> dict[str, Any]:
        """`turn` numbers the orders: one that was overtaken on its way is dropped."""
        hosted = self._hosted.get(number)
        ending = GONE if hosted is None else hosted.ending
        if hosted is not None and not ending and turn > hosted.armed:
            hosted.armed = turn
            try:
                if confirm:
                    await self._aside(partial(hosted.holder.arm, stop_us, kill_us, confirm=True))
                else:
                    hosted.holder.arm(stop_us, kill_us)
            except WorkerLost as e:
                ending = e.message
        return {"ending": ending, "now_us": CLOCK.monotonic_us()}

    async def over(self, number: str) -> str:
        """Answer with the reason when it has ended. Whoever waits here also hears of this node's loss,
        without polling."""
        while (hosted := self._hosted.get(number)) is not None:
            if hosted.ending:
                return hosted.ending
            await asyncio.sleep(WATCH_SECONDS)
        return GONE

    async def warn(self, number: str) -> None:
        if (hosted := self._hosted.get(number)) is not None:
            hosted.holder.warn()

    async def interrupt(self, number: str) -> None:
        hosted = self._hosted.get(number)
        if hosted is not None and hosted.worker is not None:
            if hosted.call is not None:
                hosted.call.interrupted = True  # should it not have begun yet
            hosted.worker.interrupt()

    async def end(self, number: str, why: str) -> None:
        await self._aside(partial(self._end, number, why))

    def _end(self, number: str, why: str) -> None:
        hosted = self._hosted.pop(number, None)
        if hosted is not None:
            hosted.end(why)

    # commands

    async def start_command(self, job: str, asked: dict[str, Any]) -> dict[str, Any]:
        number = secrets.token_hex(8)
        made = await self._aside(lambda: NodeCommand(self._settings, number, asked, _environment()))
        return self._started(number, _Hosted(made, job))

    async def begin_command(
        self, number: str, key: LeaseKey, environment: dict[str, str]
    ) -> tuple[int, list[Event]]:
        hosted = self._hosted.get(number)
        if hosted is None or hosted.command is None:
            return 0, [("lost", GONE, False, True)]
        running = hosted.call = _RunningCall(asyncio.get_running_loop())
        try:
            await self._aside(partial(hosted.command.begin, key, environment, running.say))
        except (SubletError, OSError) as e:  # a full disk of this node's is not the node's loss
            return 0, [("lost", str(e), False, False)]
        return await running.fetch(0)

    async def drain(self, number: str, source: str, reason: str, deadline_us: int) -> None:
        hosted = self._hosted.get(number)
        if hosted is not None and hosted.command is not None:
            notice = Notice(source=source, reason=reason, deadline_us=deadline_us)
            await self._aside(partial(hosted.command.drain, notice))

    async def deafen(self, number: str, stream: int) -> None:
        hosted = self._hosted.get(number)
        if hosted is not None and hosted.command is not None:
            hosted.command.deafen(stream)

    # calls

    async def around(self) -> dict[str, Any]:
        """Return what a worker's first call needs of this node: its environment without ours or Ray's
        variables, and where modules are."""
        kept = _environment()
        kept["SUBLET_HOME"] = str(self._settings.home)  # what it keeps on disk is kept where this node's is
        return {"environment": kept, "path": [place for place in sys.path if place]}

    async def call(self, number: str, serial: int, target: str, parts: list[Any]) -> tuple[int, list[Event]]:
        hosted = self._hosted.get(number)
        if hosted is None or hosted.worker is None:
            return 0, [("lost", GONE, False, True)]
        if hosted.call is not None:
            hosted.call.leave()  # whoever made it went away in its middle
        running = hosted.call = _RunningCall(asyncio.get_running_loop())
        hosted.serial = serial
        threading.Thread(
            target=_run,
            args=(hosted.worker, target, parts, running),
            name=f"sublet-call-{serial}",
            daemon=True,
        ).start()
        return await running.fetch(0)

    async def more(self, number: str, serial: int, seen: int) -> tuple[int, list[Event]]:
        running = self._running(number, serial)
        if running is None:
            return seen, [("lost", "its agent was started anew", True, True)]
        return await running.fetch(seen)

    async def answer(self, number: str, serial: int, fine: bool, parts: list[Any]) -> None:
        running = self._running(number, serial)
        if running is not None:
            running.replies.put((fine, parts))

    async def forget(self, number: str, serial: int) -> None:
        """Drop a large answer that has arrived, instead of keeping it until the next call."""
        if self._running(number, serial) is not None:
            self._hosted[number].call = None

    def _running(self, number: str, serial: int) -> _RunningCall | None:
        hosted = self._hosted.get(number)
        return hosted.call if hosted is not None and hosted.serial == serial else None


def _environment() -> dict[str, str]:
    """The environment of this node's `ray start`, without ours or Ray's variables. Ray limits its own
    processes to one thread each, which is not meant for ours."""
    seen = dict(os.environ)
    with contextlib.suppress(OSError):
        pairs = Path(f"/proc/{os.getppid()}/environ").read_bytes().split(b"\0")
        raylet = dict(os.fsdecode(pair).split("=", 1) for pair in pairs if b"=" in pair)
        seen = {k: raylet.get(k, v) for k, v in seen.items() if k in raylet or k not in RAYS_OWN}
    return {k: v for k, v in seen.items() if not k.startswith(("SUBLET_", "RAY_"))}


def _run(worker: Callee, target: str, parts: list[Any], running: _RunningCall) -> None:
    before = worker.launches
    try:
        fine, answer = worker.call_sealed(target, [memoryview(part) for part in parts], running)
        running.over(("done", fine, carried(answer), worker.launches - before))
    except WorkerLost as e:
        running.over(("lost", e.message, e.begun, False))
    except SubletError as e:
        running.over(("refused", e.message, e.remedy))
    except BaseException as e:  # whoever waits must hear of anything
        running.over(("lost", f"{type(e).__name__}: {e}", True, False))


def _jobs_over() -> frozenset[str]:
    """Ray's jobs that are over. There is no public way to ask inside a cluster without its dashboard; without
    an answer, a worker lives until its deadline, which its driver no longer moves."""
    try:
        from ray._private import state

        jobs: Any = state.jobs
        return frozenset(job["JobID"] for job in jobs() if job.get("IsDead"))
    except Exception:
        return frozenset()
