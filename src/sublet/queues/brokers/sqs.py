"""Amazon SQS, or a server that speaks its protocol.

Rules of this file:
- Credentials come from where Amazon's library takes them (environment, files, role), never from the address;
  so does the endpoint of another server, `AWS_ENDPOINT_URL`.
- The queue must exist: its cost and its permissions are not a worker's to decide.
- A message's key: its attribute `key`, else the deduplication id its sender gave, else Amazon's message id. A
  deduplication id that Amazon made from the body is nobody's name: two equal messages an hour apart are two.
- A message that we send always has the attribute `key`: an attempt whose answer was lost is repeated, and is
  then the same item.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from sublet.core.errors import BadInput, BrokerDown, Misconfigured, NotFound, TooLarge
from sublet.ports.broker import BrokerMessage
from sublet.queues.brokers.address import BrokerAddress, library, read_address
from sublet.queues.brokers.message import body_of, key_of, say_put_aside, sendable

T = TypeVar("T")

AT_ONCE = 10  # Amazon's limit for one request
#: What one request may hold, all messages and their keys together; Amazon's limit was this for long and is
#: higher now.
MOST_BYTES = 262_144
LONGEST_WAIT_SECONDS = 20  # Amazon's limit for one long poll
#: Between two questions when less than a second is left, which is the shortest wait Amazon knows.
PAUSE_SECONDS = 0.2
KEY_ATTRIBUTE = "key"

_REFUSED = {
    "AccessDenied",
    "AccessDeniedException",
    "ExpiredToken",
    "ExpiredTokenException",
    "IncompleteSignature",
    "InvalidAccessKeyId",
    "InvalidClientTokenId",
    "InvalidSecurity",
    "KmsAccessDenied",
    "MissingAuthenticationToken",
    "OptInRequired",
    "SignatureDoesNotMatch",
    "UnrecognizedClientException",
}
_GONE = {"AWS.SimpleQueueService.NonExistentQueue", "QueueDoesNotExist", "NonExistentQueue"}
_TOO_LARGE = {"AWS.SimpleQueueService.BatchRequestTooLong", "BatchRequestTooLong", "MessageTooLong"}


class SqsBroker:
    def __init__(self, address: BrokerAddress) -> None:
        self._boto3 = library("boto3", "SQS", "sqs")
        self._errors = library("botocore.exceptions", "SQS", "sqs")
        self._address = address
        self._name = address.queue
        if not re.fullmatch(r"[A-Za-z0-9_-]{1,80}|[A-Za-z0-9_-]{1,75}\.fifo", self._name):
            raise BadInput(
                f"{self._name[:80]!r} is no name of an SQS queue: 1 to 80 letters, digits, '-' and '_'",
                remedy="name the queue at Amazon with ?queue=NAME",
            )
        if address.user or address.password:
            raise BadInput(
                "an sqs:// address holds no credentials",
                remedy="set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or give the machine a role",
            )
        self._longest_wait = min(LONGEST_WAIT_SECONDS, address.timeout_seconds / 2)
        self._fifo = self._name.endswith(".fifo")
        self._unsettled: dict[str, str] = {}  # receipt handles of this broker, in order
        self._client = self._in_our_words(self._connect)
        owner = {"QueueOwnerAWSAccountId": address.path} if address.path else {}
        self._url: str = self._in_our_words(
            lambda: self._client.get_queue_url(QueueName=self._name, **owner)["QueueUrl"]
        )

    # the port

    def receive(self, most: int, *, wait_us: int = 0) -> list[BrokerMessage]:
        until = time.monotonic() + wait_us / 1e6
        messages: list[BrokerMessage] = []
        while len(messages) < most:
            left = 0.0 if messages else until - time.monotonic()
            found = self._ask(
                min(AT_ONCE, most - len(messages)), int(max(0.0, min(left, self._longest_wait)))
            )
            messages += [self._read(one) for one in found]
            if not found:
                left = until - time.monotonic()
                if messages or left <= 0:
                    break
                if left < 1:
                    time.sleep(min(left, PAUSE_SECONDS))
        return messages

    def settle(self, messages: Sequence[BrokerMessage]) -> None:
        """What could not be deleted comes again, as a duplicate."""
        handles = [m.receipt for m in messages if m.receipt in self._unsettled]
        for some in _tens(handles):
            entries = [{"Id": str(n), "ReceiptHandle": handle} for n, handle in enumerate(some)]
            self._in_our_words(
                lambda entries=entries: self._client.delete_message_batch(  # type: ignore[misc]
                    QueueUrl=self._url, Entries=entries
                )
            )
            for handle in some:
                self._unsettled.pop(handle, None)

    def give_back(self, messages: Sequence[BrokerMessage]) -> None:
        self._show_again([m.receipt for m in messages if m.receipt in self._unsettled])

    def put_aside(self, message: BrokerMessage, why: str) -> None:
        """Only Amazon moves a message to a dead-letter queue, when it was received often enough; it is not
        deleted before."""
        self._unsettled.pop(message.receipt, None)
        where = "it is left to the queue's redrive policy, and to its retention without one"
        say_put_aside(self._name, message.key, where, f"is refused ({why})")

    def publish(self, items: Sequence[tuple[str, Any]]) -> None:
        entries = [self._entry(n, key, text) for n, (key, text) in enumerate(sendable(items))]
        for batch in _batches(entries):
            left = self._send(batch)
            if left:
                left = self._send(left)
            if left:
                raise BrokerDown(f"SQS did not take {len(left)} messages of {self._name!r}: try again")

    def depth(self) -> int | None:
        name = "ApproximateNumberOfMessages"
        found = self._in_our_words(
            lambda: self._client.get_queue_attributes(QueueUrl=self._url, AttributeNames=[name])
        )
        return int(found["Attributes"][name])

    def describe(self) -> dict[str, str]:
        return {"kind": "SQS", "place": f"sqs://{self._client.meta.region_name}", "queue": self._name}

    def close(self) -> None:
        try:
            self._show_again(list(self._unsettled))
        except (BrokerDown, Misconfigured, NotFound):
            pass  # they lapse by themselves
        self._unsettled.clear()
        self._client.close()

    # at the server

    def _connect(self) -> Any:
        config = library("botocore.config", "SQS", "sqs").Config(
            connect_timeout=self._address.timeout_seconds,
            read_timeout=self._address.timeout_seconds,
            retries={"total_max_attempts": 2, "mode": "standard"},  # on a new connection
        )
        return self._boto3.session.Session().client(
            "sqs", region_name=self._address.host or None, config=config
        )

    def _ask(self, most: int, wait_seconds: int) -> list[dict[str, Any]]:
        found = self._in_our_words(
            lambda: self._client.receive_message(
                QueueUrl=self._url,
                MaxNumberOfMessages=most,
                WaitTimeSeconds=wait_seconds,
                VisibilityTimeout=self._address.visibility_seconds,
                MessageAttributeNames=[KEY_ATTRIBUTE],
                MessageSystemAttributeNames=["ApproximateReceiveCount", "MessageDeduplicationId"],
            )
        )
        return list(found.get("Messages", ()))

    def _read(self, found: dict[str, Any]) -> BrokerMessage:
        data = found["Body"].encode("utf-8", "surrogatepass")
        about = found.get("Attributes", {})
        sender = found.get("MessageAttributes", {}).get(KEY_ATTRIBUTE, {}).get("StringValue")
        given = about.get("MessageDeduplicationId")
        if given == hashlib.sha256(data).hexdigest():
            given = None
        handle = found["ReceiptHandle"]
        self._unsettled[handle] = found["MessageId"]
        return BrokerMessage(
            key=key_of(data, sender, given, found["MessageId"]),
            body=body_of(data),
            receipt=handle,
            redelivered=int(about.get("ApproximateReceiveCount", 1)) > 1,
        )

    def _show_again(self, handles: Sequence[str]) -> None:
        for some in _tens(handles):
            entries = [
                {"Id": str(n), "ReceiptHandle": handle, "VisibilityTimeout": 0}
                for n, handle in enumerate(some)
            ]
            self._in_our_words(
                lambda entries=entries: self._client.change_message_visibility_batch(  # type: ignore[misc]
                    QueueUrl=self._url, Entries=entries
                )
            )
            for handle in some:
                self._unsettled.pop(handle, None)

    def _entry(self, number: int, key: str, text: str) -> dict[str, Any]:
        entry: dict[str, Any] = {
            "Id": str(number),
            "MessageBody": text,
            "MessageAttributes": {KEY_ATTRIBUTE: {"DataType": "String", "StringValue": key}},
        }
        if self._fifo:  # a group for each key: no message waits for another
            named = hashlib.sha256(key.encode()).hexdigest()
            entry |= {"MessageGroupId": named, "MessageDeduplicationId": named}
        return entry

    def _send(self, entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Send them; return those it did not take but may take next time."""
        answer = self._in_our_words(
            lambda: self._client.send_message_batch(QueueUrl=self._url, Entries=entries)
        )
        failed = {one["Id"]: one for one in answer.get("Failed", ())}
        for one in failed.values():
            if one.get("SenderFault"):
                raise BadInput(
                    f"SQS refused a message of {self._name!r}: {one.get('Code')} {one.get('Message', '')}"
                )
        return [entry for entry in entries if entry["Id"] in failed]

    def _in_our_words(self, act: Callable[[], T]) -> T:
        e = self._errors
        try:
            return act()
        except e.ClientError as error:
            code = str(error.response.get("Error", {}).get("Code", ""))
            said = str(error.response.get("Error", {}).get("Message", ""))[:300]
            if code in _GONE:
                raise NotFound(
                    f"there is no SQS queue {self._name!r} in this account and region",
                    remedy=f"aws sqs create-queue --queue-name {self._name}, or name another with "
                    "?queue=NAME",
                ) from error
            if code in _REFUSED:
                raise Misconfigured(
                    f"SQS refuses these credentials ({code})",
                    remedy="they need sqs:GetQueueUrl, ReceiveMessage, DeleteMessage, "
                    "ChangeMessageVisibility, SendMessage and GetQueueAttributes",
                ) from error
            if code in _TOO_LARGE or "must be shorter than" in said:
                raise TooLarge(f"SQS takes no message of this size: {said}") from error
            status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 500))
            if 400 <= status < 500 and status not in (403, 408, 429):
                raise BadInput(f"SQS refused: {code}: {said}") from error
            raise BrokerDown(f"SQS refused: {code}: {said}") from error
        except (e.NoCredentialsError, e.PartialCredentialsError, e.NoRegionError, e.ProfileNotFound) as error:
            raise Misconfigured(
                f"SQS cannot be asked: {error}",
                remedy="set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY or give the machine a role; "
                "the region is in the address: sqs://eu-west-1",
            ) from error
        except (e.BotoCoreError, OSError) as error:
            raise BrokerDown(f"SQS cannot be reached: {type(error).__name__}") from error
        except ValueError as error:  # an endpoint that is no address
            raise Misconfigured(f"the settings for SQS are not usable: {error}") from error


def _tens(handles: Sequence[str]) -> list[Sequence[str]]:
    return [handles[first : first + AT_ONCE] for first in range(0, len(handles), AT_ONCE)]


def _batches(entries: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """At most ten messages, and at most so many bytes unless one alone has more: Amazon then refuses it
    itself."""
    made: list[list[dict[str, Any]]] = []
    size = 0
    for entry in entries:
        key = entry["MessageAttributes"][KEY_ATTRIBUTE]["StringValue"]
        own = len(entry["MessageBody"]) + len(key.encode()) + 32
        if not made or len(made[-1]) == AT_ONCE or size + own > MOST_BYTES:
            made.append([])
            size = 0
        made[-1].append(entry)
        size += own
    return made


def open_sqs(url: str, queue: str) -> SqsBroker:
    """sqs://REGION, sqs://REGION/ACCOUNT for another's queue, sqs:// for the region of the environment.
    Options: queue, timeout, visibility."""
    return SqsBroker(read_address(url, queue, options=("visibility",)))
