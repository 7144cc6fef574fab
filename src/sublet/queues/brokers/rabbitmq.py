"""RabbitMQ, or another broker that speaks AMQP 0-9-1.

Rules of this file:
- Nothing is fetched beyond what is returned. A consumer lives for one `receive`, with a prefetch of exactly
  what was asked for; what is on its way when it is cancelled arrives before the answer to that, so it is
  returned too.
- What was not settled is the server's again when the connection ends, however it ends. A receipt is therefore
  worth nothing on the next connection, and is let go without an error.
- A publish returns when the server has confirmed every message: durable queue, persistent message, refused if
  no queue takes it.
- Every wait ends: the socket has a limit of its own, below whatever the library waits for.
- The queue is made (durable) when it is not there. One that is there is used as it is, dead-letter exchange,
  quorum or limits included.
"""

from __future__ import annotations

import contextlib
import ssl
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import quote

from sublet.core.errors import BadInput, BrokerDown, Misconfigured
from sublet.ports.broker import BrokerMessage
from sublet.queues.brokers.address import BrokerAddress, library, read_address
from sublet.queues.brokers.message import UnreadableBody, body_of, key_of, say_put_aside, sendable

T = TypeVar("T")

#: A server that hears nothing for two of these gives back what this connection had not settled.
HEARTBEAT_SECONDS = 60
#: How long to wait for more messages once one has come.
LULL_SECONDS = 0.01
#: How many messages are sent before their confirmations are read.
IN_FLIGHT = 500
#: The longest text AMQP takes as an id; a longer key travels in a header.
LONGEST_ID = 255
KEY_HEADER = "sublet-key"


@dataclass(frozen=True, slots=True)
class DeliveryTag:
    connection: int
    tag: int


class RabbitBroker:
    def __init__(self, address: BrokerAddress) -> None:
        self._amqp = library("amqp", "RabbitMQ", "brokers")
        self._address = address
        self._vhost = address.path or "/"
        self._queue = address.queue
        self._patience = min(
            address.timeout_seconds, HEARTBEAT_SECONDS / 4
        )  # a server's heartbeats never feed it
        if not 1 <= len(self._queue.encode()) <= LONGEST_ID:
            raise BadInput("a queue's name at RabbitMQ is 1 to 255 bytes", remedy="name it with ?queue=NAME")
        self._connection: Any = None
        self._channel: Any = None
        self._number = 0  # of the connection
        self._unsettled: set[int] = set()
        self._sent = 0
        self._unconfirmed: set[int] = set()
        self._refused = ""
        self._twice(self._open)

    # the port

    def receive(self, most: int, *, wait_us: int = 0) -> list[BrokerMessage]:
        if most < 1:
            return []
        until = time.monotonic() + wait_us / 1e6
        return self._twice(lambda: self._receive(most, until))

    def settle(self, messages: Sequence[BrokerMessage]) -> None:
        tags = self._held(messages)
        with self._lapsing():
            below = {tag for tag in self._unsettled if tags and tag <= max(tags)}
            if below and below == tags:
                self._channel.basic_ack(max(tags), multiple=True)
            else:
                for tag in sorted(tags):
                    self._channel.basic_ack(tag)
            self._unsettled -= tags

    def give_back(self, messages: Sequence[BrokerMessage]) -> None:
        with self._lapsing():
            for tag in sorted(
                self._held(messages), reverse=True
            ):  # each goes to the front: first in, first again
                self._channel.basic_reject(tag, requeue=True)
                self._unsettled.discard(tag)

    def put_aside(self, message: BrokerMessage, why: str) -> None:
        with self._lapsing():
            for tag in self._held([message]):
                self._channel.basic_reject(tag, requeue=False)
                self._unsettled.discard(tag)
        say_put_aside(self._queue, message.key, "RabbitMQ was told to dead-letter it", f"is refused ({why})")

    def publish(self, items: Sequence[tuple[str, Any]]) -> None:
        left = sendable(items)
        while left:
            now = left[:IN_FLIGHT]
            self._twice(lambda now=now: self._send(now))  # type: ignore[misc]
            left = left[len(now) :]

    def depth(self) -> int | None:
        return self._twice(lambda: int(self._open().queue_declare(self._queue, passive=True).message_count))

    def describe(self) -> dict[str, str]:
        return {
            "kind": "RabbitMQ",
            "place": f"{self._address.place}/{quote(self._vhost, safe='')}",
            "queue": self._queue,
        }

    def close(self) -> None:
        connection = self._forget()
        if connection is not None:
            with contextlib.suppress(Exception):  # an end without a farewell gives everything back as well
                connection.close()
            with contextlib.suppress(Exception):
                connection.collect()

    # one connection

    def _open(self) -> Any:
        if self._channel is not None:
            return self._channel
        a = self._address
        self._connection = self._amqp.Connection(
            host=f"[{a.host}]:{a.port}" if ":" in a.host else f"{a.host}:{a.port}",
            userid=a.user or "guest",
            password=a.password or "guest",
            login_method="PLAIN",
            virtual_host=self._vhost,
            ssl=_tls(a),
            connect_timeout=a.timeout_seconds,
            heartbeat=HEARTBEAT_SECONDS,
        )
        self._connection.connect()
        self._connection.sock.settimeout(self._patience)
        channel = self._channel_with_queue(self._connection)
        channel.confirm_select()
        channel.events["basic_ack"].add(self._confirmed)
        channel.events["basic_nack"].add(self._not_taken)
        channel.events["basic_return"].add(self._returned)
        self._channel = channel
        return channel

    def _channel_with_queue(self, connection: Any) -> Any:
        channel = connection.channel()
        try:
            channel.queue_declare(self._queue, passive=True)
        except self._amqp.exceptions.NotFound:  # which has ended the channel
            channel = connection.channel()
            channel.queue_declare(self._queue, durable=True, auto_delete=False)
        return channel

    def _forget(self) -> Any:
        connection, self._connection, self._channel = self._connection, None, None
        self._number += 1
        self._unsettled.clear()
        self._unconfirmed.clear()
        self._sent, self._refused = 0, ""
        return connection

    def _drop(self) -> None:
        connection = self._forget()
        if connection is not None:
            with contextlib.suppress(Exception):
                connection.collect()

    def _twice(self, act: Callable[[], T]) -> T:
        """Do it on this connection, and if that is lost once more on a new one."""
        try:
            return self._in_our_words(act)
        except BrokerDown:
            self._drop()
        try:
            return self._in_our_words(act)
        except BrokerDown:
            self._drop()
            raise

    def _in_our_words(self, act: Callable[[], T]) -> T:
        errors = self._amqp.exceptions
        try:
            return act()
        except (
            errors.AccessRefused,
            errors.NotAllowed,
            errors.ResourceLocked,
            errors.PreconditionFailed,
        ) as e:
            self._drop()
            raise Misconfigured(
                f"RabbitMQ at {self._address.place} refuses this user, virtual host or queue "
                f"{self._queue!r}: {e.reply_text}",
                remedy="check user, password and virtual host in the address, and the user's "
                "permissions (configure, write, read)",
            ) from e
        except ssl.SSLCertVerificationError as e:
            self._drop()
            raise Misconfigured(
                f"the certificate of {self._address.place} is not trusted: {e.verify_message}",
                remedy="name its authority's file with ?ca=PATH in the address",
            ) from e
        except (OSError, errors.AMQPError) as e:
            raise BrokerDown(f"RabbitMQ at {self._address.place} cannot be reached: {_words(e)}") from e

    @contextlib.contextmanager
    def _lapsing(self) -> Any:
        """Ignore a lost connection: it has given back what it held, so there is nothing to settle."""
        try:
            yield
        except (OSError, self._amqp.exceptions.AMQPError):
            self._drop()

    # receiving

    def _receive(self, most: int, until: float) -> list[BrokerMessage]:
        while True:
            taken = self._take(most, until)
            messages = [m for m in map(self._read, taken) if m is not None]
            if messages or not taken:
                return messages

    def _take(self, most: int, until: float) -> list[Any]:
        channel, taken = self._open(), list[Any]()
        channel.basic_qos(0, min(most, 65_535), False)
        consumer = channel.basic_consume(self._queue, callback=taken.append)
        while len(taken) < most:
            left = until - time.monotonic()
            if not taken and left <= 0:
                break
            try:
                self._connection.drain_events(
                    timeout=LULL_SECONDS if taken else min(left, HEARTBEAT_SECONDS / 4)
                )
            except TimeoutError:
                if taken:
                    break
                self._connection.heartbeat_tick()
        channel.basic_cancel(consumer)
        self._unsettled.update(m.delivery_info["delivery_tag"] for m in taken)
        return taken

    def _read(self, found: Any) -> BrokerMessage | None:
        tag = int(found.delivery_info["delivery_tag"])
        sent = found.properties
        data = found.body if isinstance(found.body, bytes) else found.body.encode("utf-8", "surrogatepass")
        header = (sent.get("application_headers") or {}).get(KEY_HEADER)
        key = key_of(data, header if isinstance(header, str) else None, sent.get("message_id"))
        try:
            body = body_of(data)
        except UnreadableBody:
            self._channel.basic_reject(tag, requeue=False)
            self._unsettled.discard(tag)
            say_put_aside(self._queue, key, "RabbitMQ was told to dead-letter it")
            return None
        again = bool(found.delivery_info["redelivered"])
        return BrokerMessage(key=key, body=body, receipt=DeliveryTag(self._number, tag), redelivered=again)

    def _held(self, messages: Sequence[BrokerMessage]) -> set[int]:
        ours = {m.receipt.tag for m in messages if m.receipt.connection == self._number}
        return ours & self._unsettled

    # publishing

    def _send(self, items: Sequence[tuple[str, str]]) -> None:
        channel = self._open()
        for key, text in items:
            long = len(key.encode()) > LONGEST_ID
            sent = self._amqp.Message(
                text,
                content_type="application/json",
                content_encoding="utf-8",
                delivery_mode=2,
                **({"application_headers": {KEY_HEADER: key}} if long else {"message_id": key}),
            )
            self._sent += 1
            self._unconfirmed.add(self._sent)
            channel.basic_publish(sent, exchange="", routing_key=self._queue, mandatory=True)
        while self._unconfirmed:
            self._connection.drain_events(timeout=self._patience)
        refused, self._refused = self._refused, ""
        if refused:
            self._drop()  # the queue is looked for anew
            raise BrokerDown(f"RabbitMQ at {self._address.place} did not take every message: {refused}")

    def _confirmed(self, tag: int, multiple: bool) -> None:
        self._unconfirmed -= {t for t in self._unconfirmed if t <= tag} if multiple else {tag}

    def _not_taken(self, tag: int, multiple: bool) -> None:
        self._confirmed(tag, multiple)
        self._refused = f"it refused them (is the queue {self._queue!r} full?)"

    def _returned(self, *why: Any) -> None:
        self._refused = f"no queue {self._queue!r} is there"


def _tls(address: BrokerAddress) -> Any:
    if address.scheme != "amqps":
        return False
    ca = address.options.get("ca") or None
    return {
        "server_hostname": address.host,
        "do_handshake_on_connect": False,  # the library does it itself, with a limit
        "context": {"check_hostname": True, "cafile": ca},
    }


def _words(e: Exception) -> str:
    if isinstance(e, TimeoutError):
        return "no answer in time"
    return str(getattr(e, "strerror", None) or getattr(e, "reply_text", None) or e or type(e).__name__)


def open_amqp(url: str, queue: str) -> RabbitBroker:
    """amqp://USER:PASSWORD@HOST:5672/VHOST, amqps:// with TLS (5671). Options: queue, timeout, ca."""
    secure = url.lower().startswith("amqps:")
    return RabbitBroker(
        read_address(url, queue, options=("ca",), port=5671 if secure else 5672, host="localhost")
    )
