"""Google Cloud Pub/Sub, by plain pulls.

Rules of this file:
- One pull is one request for at most what was asked for, and one acknowledgement is one request: no thread
  fetches ahead or extends anything. What was not acknowledged comes again when the subscription's own
  deadline is over.
- The queue is a subscription of that name. When it is not there it is made, with a topic of the same name
  (`?topic=`) if that is not there either, and never expires: a topic without a subscription forgets what is
  published to it.
- A message's key: its attribute `key`, else the message id that Google gave it.
- A body that is not text goes to the subscription's dead-letter topic. Without one it is acknowledged with a
  warning: nacked, it would come again for ever.
- Every request has a limit and is made twice at most; the library's own retries are off.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from sublet.core.errors import BadInput, BrokerDown, Misconfigured, NotFound, TooLarge
from sublet.ports.broker import BrokerMessage
from sublet.queues.brokers.address import BrokerAddress, library, read_address
from sublet.queues.brokers.message import UnreadableBody, body_of, json_of, key_of, say_put_aside, sendable

T = TypeVar("T")

AT_ONCE = 1000  # Google's limit for one request
#: Google's limit for one request is 10 MB.
MOST_BYTES = 9_000_000
LONGEST_PULL_SECONDS = 60.0
KEY_ATTRIBUTE = "key"


class PubSubBroker:
    def __init__(self, address: BrokerAddress, project: str) -> None:
        self._api = library("google.pubsub_v1", "Pub/Sub", "pubsub")
        self._errors = library("google.api_core.exceptions", "Pub/Sub", "pubsub")
        self._auth = library("google.auth.exceptions", "Pub/Sub", "pubsub")
        self._address = address
        self._project = project
        self._name = address.queue
        topic = address.options.get("topic") or self._name
        for name in (self._name, topic):
            if not re.fullmatch(r"(?!goog)[A-Za-z][A-Za-z0-9._~+%-]{2,254}", name):
                raise BadInput(
                    f"{name[:80]!r} is no name of a subscription or topic: a letter, then 2 to 254 letters, "
                    "digits and . _ ~ + % -",
                    remedy="name the subscription with ?queue=NAME and the topic with ?topic=NAME",
                )
        self._subscription = f"projects/{project}/subscriptions/{self._name}"
        self._topic = f"projects/{project}/topics/{topic}"
        self._dead_letter = ""
        self._unsettled: dict[str, None] = {}  # ack ids of this broker, in order
        self._subscriber: Any = None
        self._publisher: Any = None
        self._twice(self._find)

    # the port

    def receive(self, most: int, *, wait_us: int = 0) -> list[BrokerMessage]:
        until = time.monotonic() + wait_us / 1e6
        while most > 0:
            found = self._twice(lambda: self._pull(min(most, AT_ONCE), until - time.monotonic()))
            messages = [m for m in map(self._read, found) if m is not None]
            if messages or (not found and time.monotonic() >= until):
                return messages
        return []

    def settle(self, messages: Sequence[BrokerMessage]) -> None:
        self._acknowledge([m.receipt for m in messages if m.receipt in self._unsettled])

    def give_back(self, messages: Sequence[BrokerMessage]) -> None:
        self._show_again([m.receipt for m in messages if m.receipt in self._unsettled])

    def put_aside(self, message: BrokerMessage, why: str) -> None:
        where = "it is left to lapse, as its subscription has no dead-letter topic"
        if self._dead_letter:
            again = {"data": json_of(message.body).encode(), "attributes": {KEY_ATTRIBUTE: message.key}}
            self._twice(lambda: self._send(self._dead_letter, [again]))
            self.settle([message])
            where = f"it was sent to {self._dead_letter}"
        self._unsettled.pop(message.receipt, None)
        say_put_aside(self._name, message.key, where, f"is refused ({why})")

    def publish(self, items: Sequence[tuple[str, Any]]) -> None:
        sent = [{"data": text.encode(), "attributes": {KEY_ATTRIBUTE: key}} for key, text in sendable(items)]
        for batch in _batches(sent):
            self._twice(lambda batch=batch: self._send(self._topic, batch))  # type: ignore[misc]

    def depth(self) -> int | None:
        """Unknown: only Google's monitoring has it, minutes later."""
        return None

    def describe(self) -> dict[str, str]:
        return {"kind": "Pub/Sub", "place": f"{self._address.scheme}://{self._project}", "queue": self._name}

    def close(self) -> None:
        try:
            self._show_again(list(self._unsettled))
        except (BrokerDown, Misconfigured, NotFound):
            pass  # they lapse by themselves
        self._unsettled.clear()
        self._drop()

    # at Google

    def _open(self) -> Any:
        if self._subscriber is None:
            emulator = os.environ.get("PUBSUB_EMULATOR_HOST", "")
            if emulator:
                grpc = library("grpc", "Pub/Sub", "pubsub")
                services = "google.pubsub_v1.services"
                of = {
                    kind: library(f"{services}.{kind}.transports", "Pub/Sub", "pubsub")
                    for kind in ("subscriber", "publisher")
                }
                self._subscriber = self._api.SubscriberClient(
                    transport=of["subscriber"].SubscriberGrpcTransport(
                        channel=grpc.insecure_channel(emulator)
                    )
                )
                self._publisher = self._api.PublisherClient(
                    transport=of["publisher"].PublisherGrpcTransport(channel=grpc.insecure_channel(emulator))
                )
            else:
                self._publisher = self._api.PublisherClient()
                self._subscriber = self._api.SubscriberClient()
        return self._subscriber

    def _drop(self) -> None:
        clients, self._subscriber, self._publisher = (self._subscriber, self._publisher), None, None
        for client in clients:
            if client is not None:
                client.transport.close()

    def _limits(self) -> dict[str, Any]:
        return {"retry": None, "timeout": self._address.timeout_seconds}

    def _find(self) -> None:
        subscriber = self._open()
        try:
            found = subscriber.get_subscription(subscription=self._subscription, **self._limits())
        except self._errors.PermissionDenied:
            return  # credentials that may only pull or publish cannot look
        except self._errors.NotFound:
            found = self._make()
        if not self._address.options.get("topic"):
            self._topic = found.topic
        self._dead_letter = found.dead_letter_policy.dead_letter_topic

    def _make(self) -> Any:
        try:
            self._publisher.create_topic(name=self._topic, **self._limits())
        except self._errors.AlreadyExists:
            pass
        wanted = {
            "name": self._subscription,
            "topic": self._topic,
            "ack_deadline_seconds": max(10, min(600, self._address.visibility_seconds)),
            "expiration_policy": {},  # never, instead of after 31 idle days
        }
        try:
            return self._open().create_subscription(request=wanted, **self._limits())
        except self._errors.AlreadyExists:  # another worker was faster
            return self._open().get_subscription(subscription=self._subscription, **self._limits())

    def _pull(self, most: int, left: float) -> list[Any]:
        asked: dict[str, Any] = {"subscription": self._subscription, "max_messages": most}
        if left <= 0:
            asked["return_immediately"] = True
            timeout = self._address.timeout_seconds
        else:
            timeout = min(left, LONGEST_PULL_SECONDS)
        try:
            found = self._open().pull(request=asked, retry=None, timeout=timeout)
        except self._errors.DeadlineExceeded:
            if left <= 0:
                raise
            return self._pull(most, 0)  # nothing came, or nobody is there: only an answer tells them apart
        messages = list(found.received_messages)
        self._unsettled.update((m.ack_id, None) for m in messages)
        return messages

    def _read(self, found: Any) -> BrokerMessage | None:
        data, about = bytes(found.message.data), found.message.attributes
        key = key_of(data, about.get(KEY_ATTRIBUTE), found.message.message_id)
        try:
            body = body_of(data)
        except UnreadableBody:
            self._put_aside(found, key)
            return None
        return BrokerMessage(key=key, body=body, receipt=found.ack_id, redelivered=found.delivery_attempt > 1)

    def _put_aside(self, found: Any, key: str) -> None:
        if self._dead_letter:
            again = {"data": bytes(found.message.data), "attributes": dict(found.message.attributes)}
            self._twice(lambda: self._send(self._dead_letter, [again]))
        self._acknowledge([found.ack_id])
        where = f"it was sent to {self._dead_letter}" if self._dead_letter else "it was dropped"
        say_put_aside(self._name, key, where)

    def _acknowledge(self, receipts: Sequence[str]) -> None:
        for first in range(0, len(receipts), AT_ONCE):
            some = list(receipts[first : first + AT_ONCE])
            self._twice(
                lambda some=some: self._open().acknowledge(  # type: ignore[misc]
                    subscription=self._subscription, ack_ids=some, **self._limits()
                )
            )
            for receipt in some:
                self._unsettled.pop(receipt, None)

    def _show_again(self, receipts: Sequence[str]) -> None:
        for first in range(0, len(receipts), AT_ONCE):
            some = list(receipts[first : first + AT_ONCE])
            self._twice(
                lambda some=some: self._open().modify_ack_deadline(  # type: ignore[misc]
                    subscription=self._subscription, ack_ids=some, ack_deadline_seconds=0, **self._limits()
                )
            )
            for receipt in some:
                self._unsettled.pop(receipt, None)

    def _send(self, topic: str, messages: list[dict[str, Any]]) -> None:
        self._open()
        self._publisher.publish(topic=topic, messages=messages, **self._limits())

    def _twice(self, act: Callable[[], T]) -> T:
        """Ask on the open connection, and if that is lost once more on a new one."""
        try:
            return self._in_our_words(act)
        except BrokerDown:
            self._drop()
        return self._in_our_words(act)

    def _in_our_words(self, act: Callable[[], T]) -> T:
        e = self._errors
        try:
            return act()
        except (
            e.Unauthenticated,
            e.PermissionDenied,
            self._auth.DefaultCredentialsError,
            self._auth.RefreshError,
        ) as error:
            said = getattr(error, "message", "") or type(error).__name__
            raise Misconfigured(
                f"Pub/Sub refuses these credentials for project {self._project!r}: {said}",
                remedy="set GOOGLE_APPLICATION_CREDENTIALS or give the machine an account with "
                "roles/pubsub.subscriber and roles/pubsub.publisher",
            ) from error
        except e.NotFound as error:
            raise NotFound(
                f"Pub/Sub in project {self._project!r}: {error.message}",
                remedy="check the project, or make them: gcloud pubsub subscriptions create "
                f"{self._name} --topic TOPIC",
            ) from error
        except e.InvalidArgument as error:
            if "size" in error.message.lower():
                raise TooLarge(f"Pub/Sub takes no message of this size: {error.message}") from error
            raise BadInput(f"Pub/Sub refused: {error.message}") from error
        except (e.GoogleAPICallError, e.RetryError, self._auth.TransportError, OSError) as error:
            said = getattr(error, "message", "") or type(error).__name__
            raise BrokerDown(f"Pub/Sub cannot be reached: {str(said)[:300]}") from error


def _batches(messages: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    made: list[list[dict[str, Any]]] = []
    size = 0
    for message in messages:
        own = len(message["data"]) + len(message["attributes"][KEY_ATTRIBUTE].encode()) + 64
        if not made or len(made[-1]) == AT_ONCE or size + own > MOST_BYTES:
            made.append([])
            size = 0
        made[-1].append(message)
        size += own
    return made


def open_pubsub(url: str, queue: str) -> PubSubBroker:
    """pubsub://PROJECT or gcpubsub://projects/PROJECT. Options: queue (the subscription), topic, timeout,
    visibility (of a subscription that is made)."""
    address = read_address(url, queue, options=("topic", "visibility"))
    project = address.path.strip("/") if address.host == "projects" else address.host
    if not re.fullmatch(r"[a-z0-9.:-]{1,100}", project) or address.user or address.password:
        raise BadInput("a Pub/Sub address is pubsub://PROJECT, without credentials")
    return PubSubBroker(address, project)
