"""Redis: a list that others push to.

Rules of this file:
- The queue is the list NAME: `LPUSH NAME '{"image": "cat.png"}'` is all that a producer does, and the right
  end is taken first. A key of the sender's own is sent as `{"sublet.key": "…", "body": …}`, exactly these two
  fields.
- What was received is in the hash NAME.held by the number of its delivery, and in the sorted set NAME.due by
  when it lapses. A redelivery has another number, so a receipt that lapsed can settle nothing of anybody
  else's.
- Each move is one script: a message is in the list or held, never both and never neither. Time is the
  server's, read in the script.
- The next `receive` first puts back what lapsed: nobody has to notice that a consumer is gone.
- Durability is a setting of the server: `appendonly yes` with `appendfsync always` loses nothing that was
  acknowledged.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from sublet.core.errors import BadInput, BrokerDown, Misconfigured
from sublet.ports.broker import BrokerMessage
from sublet.queues.brokers.address import BrokerAddress, library, read_address
from sublet.queues.brokers.message import UnreadableBody, body_of, key_of, say_put_aside, sendable

T = TypeVar("T")

#: The longest wait at the server; after it, messages that lapsed meanwhile are looked for.
LOOK_SECONDS = 1.0
#: The most messages one script moves, so that it does not hold up the server.
AT_ONCE = 1000
KEY_FIELD = "sublet.key"

#: list, held, due, deliveries; how many, visibility in ms. Returns number and value in turn.
TAKE = """
local t = redis.call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000)
for _, n in ipairs(redis.call('ZRANGEBYSCORE', KEYS[3], '-inf', now, 'LIMIT', 0, 1000)) do
  local value = redis.call('HGET', KEYS[2], n)
  if value then redis.call('RPUSH', KEYS[1], value) end
  redis.call('HDEL', KEYS[2], n)
  redis.call('ZREM', KEYS[3], n)
end
local taken = {}
for _ = 1, tonumber(ARGV[1]) do
  local value = redis.call('RPOP', KEYS[1])
  if not value then break end
  local n = string.format('%.0f', redis.call('INCR', KEYS[4]))
  redis.call('HSET', KEYS[2], n, value)
  redis.call('ZADD', KEYS[3], now + ARGV[2], n)
  taken[#taken + 1] = n
  taken[#taken + 1] = value
end
return taken
"""

#: held, due, and for what is not to be forgotten the list it goes to; the end of it ('' for none), then
#: delivery numbers.
END = """
for i = 2, #ARGV do
  local value = redis.call('HGET', KEYS[1], ARGV[i])
  if value then
    if ARGV[1] ~= '' then redis.call(ARGV[1], KEYS[3], value) end
    redis.call('HDEL', KEYS[1], ARGV[i])
  end
  redis.call('ZREM', KEYS[2], ARGV[i])
end
"""


class RedisBroker:
    def __init__(self, address: BrokerAddress) -> None:
        self._redis = library("redis", "Redis", "brokers")
        self._address = address
        self._queue = address.queue
        self._held, self._due = f"{self._queue}.held", f"{self._queue}.due"
        self._unsettled: set[str] = set()
        self._client = self._connect()
        self._take = self._client.register_script(TAKE)
        self._end = self._client.register_script(END)
        self._twice(lambda: self._client.llen(self._queue))

    # the port

    def receive(self, most: int, *, wait_us: int = 0) -> list[BrokerMessage]:
        until = time.monotonic() + wait_us / 1e6
        while most > 0:
            taken = self._twice(lambda: self._taken(min(most, AT_ONCE)))
            messages = [m for m in (self._read(*pair) for pair in taken) if m is not None]
            left = until - time.monotonic()
            if messages or (not taken and left <= 0):
                return messages
            if not taken:
                self._twice(lambda left=left: self._wait(left))  # type: ignore[misc]
        return []

    def settle(self, messages: Sequence[BrokerMessage]) -> None:
        self._ended([m.receipt for m in messages], "", self._queue)

    def give_back(self, messages: Sequence[BrokerMessage]) -> None:
        self._ended([m.receipt for m in reversed(messages)], "RPUSH", self._queue)

    def put_aside(self, message: BrokerMessage, why: str) -> None:
        aside = f"{self._queue}.unreadable"
        self._ended([message.receipt], "LPUSH", aside)
        say_put_aside(self._queue, message.key, f"it was moved to the list {aside!r}", f"is refused ({why})")

    def publish(self, items: Sequence[tuple[str, Any]]) -> None:
        sent = [f'{{"{KEY_FIELD}":{json.dumps(key)},"body":{text}}}' for key, text in sendable(items)]
        for first in range(0, len(sent), AT_ONCE):
            now = sent[first : first + AT_ONCE]
            self._twice(lambda now=now: self._client.lpush(self._queue, *now))  # type: ignore[misc]

    def depth(self) -> int | None:
        return int(self._twice(lambda: self._client.llen(self._queue)))

    def describe(self) -> dict[str, str]:
        place = self._address.place + (f"/{self._address.path}" if self._address.path else "")
        return {"kind": "Redis", "place": place, "queue": self._queue}

    def close(self) -> None:
        try:
            if self._unsettled:
                self._ended(sorted(self._unsettled, key=int, reverse=True), "RPUSH", self._queue)
        except (BrokerDown, Misconfigured):
            pass  # it lapses by itself
        self._unsettled.clear()
        self._client.close()

    # at the server

    def _connect(self) -> Any:
        a = self._address
        if a.path and not a.path.isdecimal():
            raise BadInput("the path of a redis:// address is the number of a database, as redis://HOST/0")
        tls = {"ssl": True, "ssl_ca_certs": a.options.get("ca") or None} if a.scheme == "rediss" else {}
        return self._redis.Redis(
            host=a.host,
            port=a.port,
            db=int(a.path or 0),
            username=a.user or None,
            password=a.password or None,
            socket_timeout=a.timeout_seconds,
            socket_connect_timeout=a.timeout_seconds,
            retry=library("redis.retry", "Redis", "brokers").Retry(
                library("redis.backoff", "Redis", "brokers").NoBackoff(), 0
            ),  # once more is ours, below
            **tls,
        )

    def _taken(self, most: int) -> list[tuple[str, bytes]]:
        found = self._take(
            keys=[self._queue, self._held, self._due, f"{self._queue}.deliveries"],
            args=[most, self._address.visibility_seconds * 1000],
        )
        pairs = [(n.decode(), value) for n, value in zip(found[::2], found[1::2], strict=True)]
        self._unsettled.update(n for n, _ in pairs)
        return pairs

    def _wait(self, seconds: float) -> None:
        """Wait until something is in the list, by moving its last element to where it is."""
        seconds = max(0.01, min(seconds, LOOK_SECONDS, self._address.timeout_seconds / 2))
        self._client.blmove(self._queue, self._queue, seconds, "RIGHT", "RIGHT")

    def _ended(self, numbers: Sequence[str], push: str, where: str) -> None:
        for first in range(0, len(numbers), AT_ONCE):
            now = numbers[first : first + AT_ONCE]
            keys, args = [self._held, self._due, where], [push, *now]
            self._twice(lambda keys=keys, args=args: self._end(keys=keys, args=args))  # type: ignore[misc]
            self._unsettled.difference_update(now)

    def _read(self, number: str, data: bytes) -> BrokerMessage | None:
        try:
            body = body_of(data)
        except UnreadableBody:
            aside = f"{self._queue}.unreadable"
            self._ended([number], "LPUSH", aside)
            say_put_aside(self._queue, key_of(data), f"it was moved to the list {aside!r}")
            return None
        if isinstance(body, dict) and body.keys() == {KEY_FIELD, "body"} and isinstance(body[KEY_FIELD], str):
            return BrokerMessage(key=key_of(data, body[KEY_FIELD]), body=body["body"], receipt=number)
        return BrokerMessage(key=key_of(data), body=body, receipt=number)

    def _twice(self, act: Callable[[], T]) -> T:
        """Ask on the open connection, and if that is lost once more on a new one. Asking twice is harmless:
        the scripts find out for themselves whether they have run, and what is pushed twice has one key."""
        try:
            return self._in_our_words(act)
        except BrokerDown:
            self._client.connection_pool.disconnect()
        return self._in_our_words(act)

    def _in_our_words(self, act: Callable[[], T]) -> T:
        errors = self._redis.exceptions
        where = f"Redis at {self._address.place}"
        try:
            return act()
        except (errors.AuthenticationError, errors.NoPermissionError) as e:
            raise Misconfigured(
                f"{where} refuses this user: {e}",
                remedy="check user and password in the address, and that the user may use lists, "
                "hashes, sorted sets and scripts",
            ) from e
        except (errors.ConnectionError, errors.TimeoutError, OSError) as e:
            certificate = "CERTIFICATE_VERIFY_FAILED" in str(e)
            if certificate:
                raise Misconfigured(
                    f"the certificate of {where} is not trusted",
                    remedy="name its authority's file with ?ca=PATH in the address",
                ) from e
            raise BrokerDown(f"{where} cannot be reached: {e}") from e
        except errors.ResponseError as e:
            said = str(e)
            if "WRONGTYPE" in said:
                raise BadInput(
                    f"{self._queue!r} at {where} is not a list",
                    remedy="name a list with ?queue=NAME: streams and other kinds are not read",
                ) from e
            if "NOAUTH" in said or "NOPERM" in said or "WRONGPASS" in said:
                raise Misconfigured(f"{where} refuses this user: {said}") from e
            raise BrokerDown(f"{where} refused: {said}") from e


def open_redis(url: str, queue: str) -> RedisBroker:
    """redis://USER:PASSWORD@HOST:6379/DATABASE, rediss:// with TLS. Options: queue, timeout, visibility,
    ca."""
    return RedisBroker(read_address(url, queue, options=("ca", "visibility"), port=6379, host="localhost"))
