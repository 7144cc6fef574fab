"""Real brokers for the tests, each on loopback ports of its own in a folder of its own, started when first asked for.

RabbitMQ and Redis are Debian's packages run as ordinary processes; SQS is moto's server; Pub/Sub is Google's emulator, which comes with the Cloud
SDK and from no registry: where it is not there its tests are skipped, in CI too.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import pytest

from sublet.processes.sandbox import kernel_calls
from tests.conftest import need
from tests.forked import SOURCE
from tests.free_ports import free_port
from tests.waiting import wait_until

PASSWORD = "canary-pass%2Fword"  # as it is written in an address
PLAIN_PASSWORD = "canary-pass/word"
#: Where Google's packages and its own installer put it.
SDKS = [Path(os.environ.get("CLOUDSDK_ROOT_DIR", "/nonexistent")), Path("/usr/lib/google-cloud-sdk"), Path("/usr/local/google-cloud-sdk"),
        Path("/opt/google-cloud-sdk"), Path("/snap/google-cloud-cli/current"), Path.home() / "google-cloud-sdk"]  # fmt: skip


class Place:
    """A running broker, seen by its users and by programs that know nothing of sublet."""

    kind: ClassVar[str]
    restarts: ClassVar[bool] = False
    brief: ClassVar[dict[str, Any]] = {}  # options that make a lost message come again soon
    #: How long a lost message is not asked for, where asking costs the machine more than waiting.
    asleep_s: ClassVar[float] = 0
    bytes_too: ClassVar[bool] = True  # a message can be something else than text
    many: ClassVar[int] = 1250  # more than any broker takes at once
    environment: dict[str, str]
    library: ClassVar[str]
    extra: ClassVar[str]

    def __init__(self) -> None:
        self.environment = {}
        self.folder = tempfile.mkdtemp(prefix="sublet-broker-")
        self.processes: list[subprocess.Popen[bytes]] = []

    def url(self, **options: Any) -> str:
        raise NotImplementedError

    def opener(self) -> Callable[[str, str], Any]:
        raise NotImplementedError

    def open(self, queue: str, /, **options: Any) -> Any:
        return self.opener()(self.url(**options), queue)

    def new_queue(self) -> str:
        return "q" + secrets.token_hex(6)

    def new_queue_with_aside(self) -> str:
        """With whatever the broker needs to keep what cannot be read."""
        return self.new_queue()

    def put_aside(self, queue: str) -> bytes | None:
        raise NotImplementedError

    def point_at(self, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """Where the address does not say the port."""

    def foreign(self, queue: str, data: bytes, message_id: str = "") -> None:
        """As another program would send it."""
        raise NotImplementedError

    def start(self) -> None:
        raise NotImplementedError

    def kill(self) -> None:
        """As a power cut would."""
        for process in reversed(self.processes):
            process.kill()
            process.wait()
        self.processes.clear()

    def is_up(self) -> bool:
        return bool(self.processes) and all(process.poll() is None for process in self.processes)

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        self.processes[-1].send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.processes[-1].send_signal(signal.SIGCONT)

    def close(self) -> None:
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def run(
        self, command: list[str], port: int, environment: dict[str, str] | None = None, seconds: float = 60
    ) -> None:
        log, us = Path(self.folder) / f"log{len(self.processes)}", os.getpid()
        with log.open("wb") as out:
            process = subprocess.Popen(
                command,
                stdout=out,
                stderr=subprocess.STDOUT,
                cwd=self.folder,
                env=os.environ | (environment or {}),
                preexec_fn=lambda: kernel_calls.die_with_parent(us),  # also when the tests are killed
            )
        self.processes.append(process)

        def answers() -> bool:
            if process.poll() is not None:
                raise RuntimeError(f"{command[0]} did not start: {log.read_text()[-2000:]}")
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                return True
            return False

        wait_until(answers, seconds)


class RabbitMq(Place):
    kind = "amqp"
    library = "amqp"
    extra = "brokers"
    restarts = True
    PROGRAM = "/usr/lib/rabbitmq/bin/rabbitmq-server"  # the one in PATH changes user and folder

    def __init__(self) -> None:
        need(os.access(self.PROGRAM, os.X_OK), "rabbitmq-server")
        need(shutil.which("epmd") is not None, "epmd (erlang)")
        super().__init__()
        self.port, self._distribution, self._names = free_port(), free_port(), free_port()
        folder = Path(self.folder)
        (folder / "plugins").write_text("[].")
        (folder / "rabbitmq.conf").write_text(
            f"default_user = tester\ndefault_pass = {PLAIN_PASSWORD}\nlog.console = true\nlog.console.level = error\n"
        )

    def start(self) -> None:
        folder = self.folder
        environment = {
            "HOME": folder,  # the cookie
            "ERL_EPMD_PORT": str(self._names),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODENAME": "tests@localhost",
            "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODE_PORT": str(self.port),
            "RABBITMQ_DIST_PORT": str(self._distribution),
            "RABBITMQ_MNESIA_BASE": f"{folder}/data",
            "RABBITMQ_LOG_BASE": f"{folder}/logs",
            "RABBITMQ_CONFIG_FILE": f"{folder}/rabbitmq.conf",
            "RABBITMQ_ENABLED_PLUGINS_FILE": f"{folder}/plugins",
            "RABBITMQ_CONF_ENV_FILE": "/dev/null",
            "RABBITMQ_PID_FILE": f"{folder}/pid",
            "RABBITMQ_ALLOW_INPUT": "1",  # no shell between it and us
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-noinput +S 1:1 +sbwt none +sbwtdcpu none +sbwtdio none",
        }
        for attempt in (1, 2):  # on a machine that is very busy it may give up on its name server
            try:
                self.run(
                    ["epmd", "-port", str(self._names), "-address", "127.0.0.1"], self._names
                )  # no daemon
                self.run([self.PROGRAM], self.port, environment, seconds=120)
                return
            except (RuntimeError, AssertionError) as e:
                self.kill()
                if attempt == 2:
                    raise
                warnings.warn(f"RabbitMQ is started once more: {e}", RuntimeWarning, stacklevel=2)

    def url(self, user: str = "tester", password: str = PASSWORD, port: int = 0, **options: Any) -> str:
        asked = "&".join(f"{k}={v}" for k, v in options.items())
        return f"amqp://{user}:{password}@127.0.0.1:{port or self.port}/?{asked}"

    def opener(self) -> Callable[[str, str], Any]:
        from sublet.queues.brokers.rabbitmq import open_amqp

        return open_amqp

    @contextlib.contextmanager
    def channel(self) -> Iterator[Any]:
        import amqp

        with amqp.Connection(f"127.0.0.1:{self.port}", userid="tester", password=PLAIN_PASSWORD) as link:
            yield link.channel()

    def _is_there(self, queue: str) -> bool:
        import amqp

        with contextlib.suppress(amqp.exceptions.NotFound), self.channel() as channel:
            channel.queue_declare(queue, passive=True)
            return True
        return False

    def new_queue_with_aside(self) -> str:
        """As an operator would make it: what is rejected goes to another queue."""
        queue = self.new_queue()
        with self.channel() as channel:
            channel.queue_declare(f"{queue}.dead", durable=True, auto_delete=False)
            arguments = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": f"{queue}.dead"}
            channel.queue_declare(queue, durable=True, auto_delete=False, arguments=arguments)
        return queue

    def put_aside(self, queue: str) -> bytes | None:
        with self.channel() as channel:
            found = channel.basic_get(f"{queue}.dead", no_ack=True)
            return None if found is None else found.body

    def foreign(self, queue: str, data: bytes, message_id: str = "") -> None:
        import amqp

        with self.channel() as channel:
            if not self._is_there(queue):
                channel.queue_declare(queue, durable=True, auto_delete=False)
            properties = {"message_id": message_id} if message_id else {}
            channel.basic_publish(amqp.Message(data, delivery_mode=2, **properties), routing_key=queue)


class Redis(Place):
    kind = "redis"
    library = "redis"
    extra = "brokers"
    restarts = True
    brief: ClassVar[dict[str, Any]] = {"visibility": 2}

    def __init__(self) -> None:
        need(shutil.which("redis-server") is not None, "redis-server")
        super().__init__()
        self.port = free_port()

    def start(self) -> None:
        options = {"port": self.port, "bind": "127.0.0.1", "dir": self.folder, "appendonly": "yes", "appendfsync": "always",
                   "save": "", "requirepass": PLAIN_PASSWORD}  # fmt: skip
        words = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
        self.run(["redis-server", *words], self.port)
        wait_until(lambda: self._answers())

    def _answers(self) -> bool:
        import redis

        with contextlib.suppress(redis.exceptions.ConnectionError):  # it may be reading its file
            return bool(self.client().ping())
        return False

    def client(self) -> Any:
        import redis

        return redis.Redis(port=self.port, password=PLAIN_PASSWORD)

    def url(self, password: str = PASSWORD, port: int = 0, **options: Any) -> str:
        asked = "&".join(f"{k}={v}" for k, v in options.items())
        return f"redis://:{password}@127.0.0.1:{port or self.port}/0?{asked}"

    def opener(self) -> Callable[[str, str], Any]:
        from sublet.queues.brokers.redis_list import open_redis

        return open_redis

    def foreign(self, queue: str, data: bytes, message_id: str = "") -> None:
        if message_id:
            data = b'{"sublet.key": "%s", "body": %s}' % (message_id.encode(), data)
        self.client().lpush(queue, data)

    def put_aside(self, queue: str) -> bytes | None:
        found = self.client().rpop(f"{queue}.unreadable")
        return found if found is None else bytes(found)


class Sqs(Place):
    kind = "sqs"
    library = "boto3"
    extra = "sqs"
    brief: ClassVar[dict[str, Any]] = {"visibility": 2}
    bytes_too = False
    many = 101  # its server needs longer for each message that is there

    def __init__(self) -> None:
        try:
            import moto.server  # noqa: F401
        except ImportError:
            need(False, "moto[sqs,server]")
        super().__init__()
        self.port = free_port()
        self.environment = {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
            "AWS_ACCESS_KEY_ID": "AKIATEST",
            "AWS_SECRET_ACCESS_KEY": PLAIN_PASSWORD,
            "AWS_CONFIG_FILE": "/dev/null",
            "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
        }

    def start(self) -> None:
        start = f"from moto.server import main; main(['-H', '127.0.0.1', '-p', '{self.port}'])"
        self.run([sys.executable, "-c", start], self.port)

    @cached_property
    def client(self) -> Any:
        import boto3

        return boto3.client(
            "sqs",
            region_name="us-east-1",
            endpoint_url=self.environment["AWS_ENDPOINT_URL"],
            aws_access_key_id="AKIATEST",
            aws_secret_access_key="x",
        )

    def new_queue(self) -> str:
        return self.made(super().new_queue())

    def made(self, queue: str, **attributes: str) -> str:
        self.client.create_queue(QueueName=queue, Attributes=attributes)
        return queue

    def url(self, port: int = 0, **options: Any) -> str:
        return "sqs://us-east-1?" + "&".join(f"{k}={v}" for k, v in options.items())

    def opener(self) -> Callable[[str, str], Any]:
        from sublet.queues.brokers.sqs import open_sqs

        return open_sqs

    def point_at(self, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")

    def foreign(self, queue: str, data: bytes, message_id: str = "", **more: str) -> None:
        key = {"key": {"DataType": "String", "StringValue": message_id}} if message_id else {}
        url = self.client.get_queue_url(QueueName=queue)["QueueUrl"]
        self.client.send_message(QueueUrl=url, MessageBody=data.decode(), MessageAttributes=key, **more)


class PubSub(Place):
    kind = "pubsub"
    library = "google.pubsub_v1"
    extra = "pubsub"
    many = 250  # a Java program that has just begun
    asleep_s: ClassVar[float] = 9.5  # the emulator keeps a core busy for each pull that waits

    def __init__(self) -> None:
        jars = [p for sdk in SDKS for p in sdk.glob("platform/pubsub-emulator/lib/*emulator*.jar")]
        skip_everywhere(bool(jars), "Google's Pub/Sub emulator")
        skip_everywhere(shutil.which("java") is not None, "java, which Google's Pub/Sub emulator needs,")
        try:
            import google.pubsub_v1  # noqa: F401
        except ImportError:
            need(False, "google-cloud-pubsub")
        super().__init__()
        self._jar = jars[0]
        self.port = free_port()
        self.environment = {"PUBSUB_EMULATOR_HOST": f"127.0.0.1:{self.port}"}

    def start(self) -> None:
        cheap = ["-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xshare:auto"]
        self.run(
            ["java", *cheap, "-jar", str(self._jar), "--host=127.0.0.1", f"--port={self.port}"], self.port
        )

    @cached_property
    def clients(self) -> tuple[Any, Any]:
        import grpc
        from google.pubsub_v1 import PublisherClient, SubscriberClient
        from google.pubsub_v1.services.publisher.transports import PublisherGrpcTransport
        from google.pubsub_v1.services.subscriber.transports import SubscriberGrpcTransport

        channel = grpc.insecure_channel(f"127.0.0.1:{self.port}")
        return (
            PublisherClient(transport=PublisherGrpcTransport(channel=channel)),
            SubscriberClient(transport=SubscriberGrpcTransport(channel=channel)),
        )

    def url(self, port: int = 0, **options: Any) -> str:
        return "pubsub://tests?" + "&".join(f"{k}={v}" for k, v in ({"visibility": 10} | options).items())

    def opener(self) -> Callable[[str, str], Any]:
        from sublet.queues.brokers.pubsub import open_pubsub

        return open_pubsub

    def new_queue(self) -> str:
        return self.made(super().new_queue())

    def made(self, queue: str, **more: Any) -> str:
        publisher, subscriber = self.clients
        topic = f"projects/tests/topics/{queue}"
        publisher.create_topic(name=topic)
        name = f"projects/tests/subscriptions/{queue}"
        subscriber.create_subscription(
            request={"name": name, "topic": topic, "ack_deadline_seconds": 10} | more
        )
        return queue

    def new_queue_with_aside(self) -> str:
        dead = super().new_queue()
        self.made(f"{dead}.dead")
        policy = {"dead_letter_topic": f"projects/tests/topics/{dead}.dead", "max_delivery_attempts": 5}
        return self.made(dead, dead_letter_policy=policy)

    def put_aside(self, queue: str) -> bytes | None:
        name = f"projects/tests/subscriptions/{queue}.dead"
        found = self.clients[1].pull(subscription=name, max_messages=1, timeout=20).received_messages
        return bytes(found[0].message.data) if found else None

    def point_at(self, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PUBSUB_EMULATOR_HOST", f"127.0.0.1:{port}")

    def foreign(self, queue: str, data: bytes, message_id: str = "") -> None:
        attributes = {"key": message_id} if message_id else {}
        topic = f"projects/tests/topics/{queue}"
        self.clients[0].publish(topic=topic, messages=[{"data": data, "attributes": attributes}])


KINDS: dict[str, type[Place]] = {"amqp": RabbitMq, "redis": Redis, "sqs": Sqs, "pubsub": PubSub}


class Places:
    """Each started when it is first asked for."""

    def __init__(self) -> None:
        self._running: dict[str, Place] = {}

    def __getitem__(self, kind: str) -> Place:
        if kind not in self._running:
            self._running[kind] = KINDS[kind]()
        place = self._running[kind]
        if not place.is_up():  # not yet, or a test left it so when it failed
            place.kill()
            place.start()
        return place

    def close(self) -> None:
        for place in self._running.values():
            place.close()


@contextlib.contextmanager
def deaf() -> Iterator[int]:
    """A port where somebody accepts and never says a word."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen(50)
        yield int(s.getsockname()[1])


@contextlib.contextmanager
def holding(place: Place, queue: str, most: int, **options: Any) -> Iterator[list[str]]:
    """Another process that has received so many, settles none, and is killed when this ends."""
    code = (
        "import sys, time\n"
        f"from {place.opener().__module__} import {place.opener().__name__} as opener\n"
        "broker = opener(sys.argv[1], sys.argv[2])\n"
        "got = broker.receive(int(sys.argv[3]), wait_us=20_000_000)\n"
        "print(*[m.key for m in got], flush=True)\n"
        "time.sleep(600)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, place.url(**options), queue, str(most)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(SOURCE)},
    )
    try:
        assert process.stdout is not None
        yield process.stdout.readline().split()
    finally:
        process.kill()
        process.wait()


def skip_everywhere(present: bool, what: str) -> None:
    """For what no registry offers: `need` would make CI fail for good."""
    if not present:
        pytest.skip(f"{what} is missing, and comes from no registry")
