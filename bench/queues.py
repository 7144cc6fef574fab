"""Queues beside their peers: items in per second, items fetched, completed and acknowledged per second.

Rules of this file:
- Everybody does the same: a small body in, durable when the call returns; then fetch, a result stored, and an acknowledgement that is durable when the
  call returns. What a peer leaves out is in its note. Ours is measured through `sublet.queue` as users call it, and through the ledger's verbs alone.
- In each turn a subject puts items for a moment and then works off what it has put. What is left over it works off before its next turn, off the clock.
- Who has no batch of its own is compared with its figure one by one.
- Each subject has processes of its own, started once and told when to begin: their start is nobody's figure.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import random
import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import sublet
from bench import queue_peers
from bench.ledgers import postgres_server
from bench.measure import MOST_WAITING_PERCENT, NOT_ALONE, Goal, Section, median_ratio, progress, waited_s
from bench.peers import NotInstalled, raw_disk
from bench.queue_peers import BODY, PEERS, QUEUE, RESULT, Client, Peer, Servers
from sublet import wiring
from sublet.core.leasing.lease import Holder
from sublet.core.queues.items import Ack, NewItem, from_text, to_text
from sublet.settings import Settings, load_settings

BATCHES = (1, 10, 100)
ROUNDS = 7
TURNS = 2
TURN_S = 0.12
SEED = 6
MOST_ITEMS = {1: 500, 10: 2_000, 100: 6_000}  # in a turn, so that whoever is quick does not fill the disk
LEFT_OVER = 300  # and more are worked off, off the clock, for so long at most
LEFT_OVER_S = 0.2
SETTLE_S = 0.02
PROCESSES = 4
PROCESS_ROUNDS = 4
PROCESS_S = 0.8
PROCESS_BATCHES = (1, 100)
PUT_AHEAD_S = 8.0
START_S = 60

SQLITE = "sublet, SQLite"
SQLITE_VERBS = "sublet, SQLite, verbs alone"
POSTGRES = "sublet, PostgreSQL"
POSTGRES_VERBS = "sublet, PostgreSQL, verbs alone"
DISK = "raw fdatasync"
PUT, WORK = "enqueue", "pull+ack"
Column = tuple[str, int]
COLUMNS: list[Column] = [(what, batch) for what in (PUT, WORK) for batch in BATCHES]


# --- ours ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _by_api(ledger: str) -> Iterator[Client]:
    """As users write it."""
    queue = sublet.queue(QUEUE, settings=_settings(ledger))

    def put(count: int) -> int:
        queue.publish(BODY if count == 1 else [BODY] * count)
        return count

    def work(count: int) -> int:
        items = queue.take(count)
        if len(items) == 1:
            items[0].complete(queue_peers.label(items[0].body))
        elif items:
            refused = queue.complete([(item, queue_peers.label(item.body)) for item in items])
            assert not any(refused), refused
        return len(items)

    yield Client(put, work)
    queue.close()


@contextlib.contextmanager
def _by_verbs(ledger: str) -> Iterator[Client]:
    """What of it is the ledger: texts in, texts out, nothing extended in the background."""
    opened = wiring.open_ledger(_settings(ledger))
    queue = opened.open_queue("verbs", QUEUE, None)
    consumer = opened.open_consumer(queue.id, Holder(host="bench"))
    body, result = to_text(BODY, what="a body"), to_text(RESULT, what="a result")
    published = 0

    def put(count: int) -> int:
        nonlocal published
        published += 1
        opened.publish(consumer, published, [NewItem(body=body)] * count)
        return count

    def work(count: int) -> int:
        given = opened.pull(consumer, count, queue.terms.visibility_us)
        for each in given:
            from_text(each.body)
        if given:
            refused = opened.complete(
                consumer, [Ack(item=each.item, delivery=each.delivery, result=result) for each in given]
            )
            assert not any(refused), refused
        return len(given)

    yield Client(put, work)


def _settings(ledger: str) -> Settings:
    return load_settings(home=ledger.partition(" ")[0], ledger=ledger.partition(" ")[2])


def _ours(name: str, opening: Callable[[str], contextlib.AbstractContextManager[Client]], note: str) -> Peer:
    return Peer(name, "", opening, [], note, puts_batches=True, works_batches=True)


OURS = [
    _ours(SQLITE, _by_api, "result stored, fenced, journalled; sublet.queue"),
    _ours(SQLITE_VERBS, _by_verbs, "the ledger's publish, pull and complete"),
    _ours(POSTGRES, _by_api, "result stored, fenced, journalled; sublet.queue"),
    _ours(POSTGRES_VERBS, _by_verbs, "the ledger's publish, pull and complete"),
]


# --- a subject and its processes -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Order:
    """What a process of a subject is told to do: items in, or items worked off."""

    what: str
    batch: int
    most: int
    seconds: float


@dataclass(frozen=True)
class Done:
    items: int = 0
    seconds: float = 0.0
    waited: float = 0.0  # ready to run, and no CPU


def _obey(name: str, address: str, pipe: Connection) -> None:
    """The main function of a subject's process."""
    peer = next(each for each in [*OURS, *PEERS] if each.name == name)
    try:
        with peer.open(address) as client:
            pipe.send(Done())
            with contextlib.suppress(EOFError):
                while True:
                    order = pipe.recv()
                    before = waited_s()
                    items, seconds = _drive(client, order)
                    pipe.send(Done(items, seconds, waited_s() - before))
    except Exception:
        with contextlib.suppress(OSError):
            pipe.send(traceback.format_exc())


def _drive(client: Client, order: Order) -> tuple[int, float]:
    """How many items, and in which time; ends when there are no more."""
    step = client.put if order.what == PUT else client.work
    batch, most, seconds = order.batch, order.most, order.seconds
    count, spent = 0, 0.0
    began = time.perf_counter()
    if client.loop is None:
        while count < most and spent < seconds and (done := step(batch)):
            count += done
            spent = time.perf_counter() - began
        return count, spent

    async def turn() -> tuple[int, float]:
        count, spent = 0, 0.0
        while count < most and spent < seconds and (done := await step(batch)):
            count += done
            spent = time.perf_counter() - began
        return count, spent

    return client.loop.run_until_complete(turn())


class Subject:
    """A peer or ourselves, in processes of its own: what it leaves running there disturbs no other's turn."""

    def __init__(self, peer: Peer, address: str, stack: contextlib.ExitStack) -> None:
        self.peer = peer
        self.name = peer.name
        self.rates: dict[Column, list[float]] = {}
        self._turns: dict[Column, list[Done]] = {}
        self.spent = self.waited = 0.0
        self._address = address
        self._stack = stack
        self._pipes: list[Connection] = []
        self._left = 0

    def start(self, processes: int) -> None:
        """So many in all; `ready` waits for them."""
        context = multiprocessing.get_context("spawn")
        while len(self._pipes) < processes:
            here, there = context.Pipe()
            worker = context.Process(target=_obey, args=(self.name, self._address, there), daemon=True)
            worker.start()
            there.close()
            self._stack.callback(_end, worker, here)
            self._pipes.append(here)

    def ready(self, processes: int) -> None:
        for pipe in self._pipes[-processes:]:
            self._answer(pipe)

    def _answer(self, pipe: Connection) -> Done:
        if not pipe.poll(START_S):
            raise RuntimeError(f"{self.name}: a process gave no answer")
        answer: Done | str = pipe.recv()
        if isinstance(answer, str):
            raise RuntimeError(f"{self.name}: a process failed:\n{answer}")
        return answer

    def batch_for(self, what: str, batch: int) -> int:
        """One by one for whoever has no batches."""
        has = self.peer.puts_batches if what == PUT else self.peer.works_batches
        return batch if has else 1

    def run(self, order: Order, processes: int = 1) -> list[Done]:
        for pipe in self._pipes[:processes]:
            pipe.send(order)
        answers = [self._answer(pipe) for pipe in self._pipes[:processes]]
        items = sum(answer.items for answer in answers)
        self._left += items if order.what == PUT else -items
        self.spent += sum(answer.seconds for answer in answers)
        self.waited += sum(answer.waited for answer in answers)
        return answers

    def turn(self, batch: int) -> None:
        """Put for a moment, work for a moment."""
        put_batch, work_batch = self.batch_for(PUT, batch), self.batch_for(WORK, batch)
        if batch > 1 and put_batch == work_batch == 1:
            return
        (put,) = self.run(Order(PUT, put_batch, MOST_ITEMS[put_batch], TURN_S))
        (work,) = self.run(Order(WORK, work_batch, put.items, TURN_S))
        for what, used, done in ((PUT, put_batch, put), (WORK, work_batch, work)):
            if used == batch:
                self._turns.setdefault((what, batch), []).append(done)
        if self._left > LEFT_OVER:
            self.run(Order(WORK, self.batch_for(WORK, BATCHES[-1]), self._left, LEFT_OVER_S))

    def end_round(self) -> None:
        """A rate of each column from the turns of this round."""
        for column, turns in self._turns.items():
            rate = sum(done.items for done in turns) / sum(done.seconds for done in turns)
            self.rates.setdefault(column, []).append(rate)
        self._turns.clear()

    def turn_of_many(self, batch: int, processes: int) -> float:
        """Items a second of all of them. Enough items are there before they begin."""
        alone = statistics.median(self.of((WORK, batch)))
        missing = int(alone * PROCESS_S * processes) - self._left
        if missing > 0:
            self.run(Order(PUT, self.batch_for(PUT, BATCHES[-1]), missing, PUT_AHEAD_S))
        done = self.run(Order(WORK, self.batch_for(WORK, batch), 1 << 40, PROCESS_S), processes)
        return sum(each.items for each in done) / max(each.seconds for each in done)

    def of(self, column: Column) -> list[float]:
        what, batch = column
        return self.rates[what, self.batch_for(what, batch)]


def _end(worker: BaseProcess, pipe: Connection) -> None:
    pipe.close()
    worker.join(timeout=5)
    if worker.is_alive():
        worker.kill()
        worker.join()


# --- rounds --------------------------------------------------------------------------------------------------


def _one_process(subjects: Sequence[Subject], disk: Callable[[], object]) -> list[float]:
    """Fills the subjects' rates; returns what the bare disk did in the same rounds."""
    for subject in subjects:
        for batch in BATCHES:
            subject.turn(batch)  # statements prepared, scripts loaded, files grown
        subject.end_round()
        subject.rates.clear()
    syncs: list[float] = []
    # Not in a fixed order: what one leaves for the disk to do would always be paid by the same other.
    order = random.Random(SEED)
    for number in range(ROUNDS):
        progress(f"queues: round {number + 1} of {ROUNDS} ...")
        for batch in [*BATCHES] * TURNS:
            for subject in order.sample(subjects, len(subjects)):
                subject.turn(batch)
                time.sleep(SETTLE_S)
        for subject in subjects:
            subject.end_round()
        count, began = 0, time.perf_counter()
        while time.perf_counter() - began < TURN_S * TURNS:
            disk()
            count += 1
        syncs.append(count / (time.perf_counter() - began))
    return syncs


def _several_processes(subjects: Sequence[Subject]) -> Section:
    progress(f"queues: {PROCESSES} processes ...")
    best = {batch: _best(subjects, (WORK, batch)) for batch in PROCESS_BATCHES}
    wanted = [each for each in subjects if each.name in (SQLITE, POSTGRES) or each in best.values()]
    rates: dict[tuple[str, int], list[float]] = {(s.name, b): [] for s in wanted for b in PROCESS_BATCHES}
    for subject in wanted:
        subject.start(PROCESSES)
    for subject in wanted:
        subject.ready(PROCESSES - 1)
        subject.turn_of_many(PROCESS_BATCHES[0], PROCESSES)
    order = random.Random(SEED)
    for _ in range(PROCESS_ROUNDS):
        for batch in PROCESS_BATCHES:
            for subject in order.sample(wanted, len(wanted)):
                rates[subject.name, batch].append(subject.turn_of_many(batch, PROCESSES))
                time.sleep(SETTLE_S)
    section = Section(
        f"Queues: {PROCESSES} processes pull, complete and acknowledge at once, items per second",
        ["", *(cell for batch in PROCESS_BATCHES for cell in (f"by {batch}", "rounds")), ""],
    )
    for subject in wanted:
        cells = [cell for batch in PROCESS_BATCHES for cell in _cells(rates[subject.name, batch])]
        section.rows.append([subject.name, *cells, subject.peer.note])
    section.goals = [
        Goal(
            f"queue, {PROCESSES} processes by {batch}, {ours} / {peer.name}",
            median_ratio(rates[ours, batch], rates[peer.name, batch]),
            1.0,
        )
        for batch, peer in best.items()
        if peer is not None
        for ours in (SQLITE, POSTGRES)
    ]
    section.notes.append(
        "the peer beside ours is the quickest of its durability in one process, for each batch"
    )
    section.data = {f"{name} by {batch}": found for (name, batch), found in rates.items()}
    return section


# --- tables --------------------------------------------------------------------------------------------------


def _cells(rates: Sequence[float]) -> list[str]:
    return [f"{statistics.median(rates):,.0f}", f"{min(rates):,.0f}-{max(rates):,.0f}"]


def _is_ours(subject: Subject) -> bool:
    return subject.peer in OURS


def _best(subjects: Sequence[Subject], column: Column, server: str | None = None) -> Subject | None:
    """The quickest peer of the same durability; on this server, if one is named."""
    others = [
        s for s in subjects if not _is_ours(s) and s.peer.same_class and server in (None, s.peer.server)
    ]
    return max(others, key=lambda s: statistics.median(s.of(column)), default=None)


def _rates(subjects: Sequence[Subject], missing: dict[str, str], what: str, title: str) -> Section:
    section = Section(title, ["", *(cell for batch in BATCHES for cell in (f"by {batch}", "rounds")), ""])
    for subject in subjects:
        cells: list[str] = []
        for batch in BATCHES:
            has = subject.batch_for(what, batch) == batch
            cells += _cells(subject.rates[what, batch]) if has else ["-", "-"]
        section.rows.append([subject.name, *cells, subject.peer.note])
        section.data[subject.name] = {
            str(batch): subject.rates[what, batch] for batch in BATCHES if (what, batch) in subject.rates
        }
    for name, why in missing.items():
        section.rows.append([name, *["-"] * 2 * len(BATCHES), why])
        section.data[name] = {"missing": why}
    section.notes.append("-: no batch of its own; compared with its figure one by one")
    return section


def _ratios(subjects: Sequence[Subject], ours: Subject) -> Section:
    section = Section(
        f"Queues: {ours.name}, as a multiple of each peer",
        ["", *(f"{what} {batch}" for what, batch in COLUMNS), ""],
    )
    for subject in subjects:
        if _is_ours(subject):
            continue
        cells = [f"{median_ratio(ours.of(column), subject.of(column)):.1f}" for column in COLUMNS]
        section.rows.append([subject.name, *cells, "" if subject.peer.same_class else "another durability"])
    return section


#: From the prototype: (ours, peer, enqueue, pull+ack, by how many).
WANTED = [
    (SQLITE, "procrastinate", 5.0, 9.0, 1),
    (POSTGRES, "procrastinate", 4.0, 3.5, 1),
    (SQLITE, "pgqueuer", 2.0, 7.0, 1),
    (SQLITE, "Celery, Redis AOF", 3.0, 7.0, 1),
    (SQLITE, "dramatiq, Redis AOF", 1.8, 1.5, 1),
    (SQLITE, "NATS JetStream", 8.0, 8.0, 100),
]


def _goals(subjects: Sequence[Subject]) -> list[Goal]:
    named = {subject.name: subject for subject in subjects}
    goals = [
        Goal(
            f"queue, {what} by {batch}, {ours} / {peer}",
            median_ratio(named[ours].of((what, batch)), named[peer].of((what, batch))),
            least,
        )
        for ours, peer, put, work, batch in WANTED
        if peer in named and named[peer].peer.same_class
        for what, least in ((PUT, put), (WORK, work))
    ]
    for ours, server, whom in (
        (SQLITE, None, "the quickest peer"),
        (POSTGRES, "postgresql", "the quickest on PostgreSQL"),
    ):
        for what, batch in COLUMNS:
            peer = _best(subjects, (what, batch), server)
            if peer is not None:
                ratio = median_ratio(named[ours].of((what, batch)), peer.of((what, batch)))
                goals.append(Goal(f"queue, {what} by {batch}, {ours} / {whom}, {peer.name}", ratio, 1.0))
    return goals


# --- all of it -----------------------------------------------------------------------------------------------


def run(place: Path) -> list[Section]:
    with contextlib.ExitStack() as stack:
        url = stack.enter_context(postgres_server(place))
        servers = Servers(place, url, stack)
        home = place / "queues"
        home.mkdir()
        addresses = {
            SQLITE: f"{home} sqlite:{home}/api.db",
            SQLITE_VERBS: f"{home} sqlite:{home}/verbs.db",
            POSTGRES: f"{home} {url}&sublet_schema=queue_api",
            POSTGRES_VERBS: f"{home} {url}&sublet_schema=queue_verbs",
        }
        stack.callback(wiring.close_all)
        missing: dict[str, str] = {}
        subjects: list[Subject] = []
        progress("queues: starting servers and subjects ...")
        for peer in [*OURS, *PEERS]:
            try:
                address = addresses.get(peer.name) or servers.address(peer)
            except NotInstalled as why:
                missing[peer.name] = str(why)
                continue
            if peer.server == "nats" and not queue_peers.nats_syncs():
                peer = replace(peer, same_class=False, note=f"ANOTHER CLASS: {queue_peers.NATS_TOO_OLD}")
            subjects.append(Subject(peer, address, stack))
            subjects[-1].start(1)
        for subject in subjects:
            subject.ready(1)
        disk, _ = stack.enter_context(raw_disk(place))
        syncs = _one_process(subjects, disk.cycle)
        sections = [
            _rates(
                subjects,
                missing,
                PUT,
                "Queues: enqueue, items per second, durable, one process, by 1, 10, 100",
            ),
            _rates(
                subjects,
                missing,
                WORK,
                "Queues: pull, complete with a result and acknowledge, items per second, durable, one process",
            ),
        ]
        sections[0].notes.append(f"raw fdatasync in the same rounds: {' '.join(_cells(syncs))} per second")
        sections[0].data[DISK] = syncs
        sections[1].goals = _goals(subjects)
        sections += [_ratios(subjects, each) for each in subjects if each.name in (SQLITE, POSTGRES)]
        sections.append(_several_processes(subjects))
        waiting = 100 * sum(s.waited for s in subjects) / sum(s.spent for s in subjects)
        sections[0].data["waited_for_cpu_percent"] = round(waiting, 1)
        sections[0].notes.append(
            f"the processes of the subjects waited for the CPU {waiting:.1f} % of their turns"
        )
        if waiting > MOST_WAITING_PERCENT:
            sections[0].notes.append(NOT_ALONE)
        for address in addresses.values():
            faults = wiring.open_ledger(_settings(address)).verify().faults
            assert not faults, faults[:3]
        return sections
