"""Other people's leases, started for the length of a measurement: etcd, Redis, filelock, and the disk itself.

Rules of this file:
- Servers are Debian's packages with their default durability, data on the same disk as the ledger. Nothing that makes
  a peer slower is set; Redis is told to fsync every write because that is the durability it is compared at.
- Each peer is driven the fastest way that was found: etcd by gRPC with ready-made messages on one channel (its JSON
  gateway when grpcio is not installed), Redis on a Unix socket with registered scripts and hiredis if it is there.
- Every cycle really excludes: the key is put only if it does not exist, and goes with its lease.
- A peer that is not installed is named with its install line, never skipped in silence.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import http.client
import itertools
import json
import os
import queue
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bench.measure import Subject

TTL_S = 300
_PR_SET_PDEATHSIG = 1


class NotInstalled(Exception):
    """Says what to install."""


def program(name: str, package: str) -> str:
    found = shutil.which(name)
    if found is None:
        raise NotInstalled(f"not installed: apt-get install {package}")
    return found


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


@contextlib.contextmanager
def served(command: list[str], ready: Callable[[], bool], *, patience_s: float = 20) -> Iterator[int]:
    """Its process id."""
    server = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=_die_with_parent,
    )
    try:
        deadline = time.monotonic() + patience_s
        while not ready():
            if server.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{command[0]} did not start")
            time.sleep(0.02)
        yield server.pid
    finally:
        server.terminate()
        try:
            server.wait(timeout=10)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def free_ports(count: int) -> list[int]:
    """Held all at once, so that they differ."""
    with contextlib.ExitStack() as stack:
        ports = []
        for _ in range(count):
            s = stack.enter_context(socket.socket())
            s.bind(("127.0.0.1", 0))
            ports.append(s.getsockname()[1])
        return ports


def folder_for(place: Path, name: str) -> Path:
    return Path(tempfile.mkdtemp(prefix=f"{name}-", dir=place))


# --- etcd ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def etcd(place: Path) -> Iterator[tuple[Subject, str]]:
    """Grant, put under the lease, keep alive, revoke: three operations, four requests."""
    server = program("etcd", "etcd-server")
    client, peer = (f"127.0.0.1:{port}" for port in free_ports(2))
    data = folder_for(place, "etcd")
    command = [
        server,
        f"--data-dir={data}",
        f"--listen-client-urls=http://{client}",
        f"--advertise-client-urls=http://{client}",
        f"--listen-peer-urls=http://{peer}",
        f"--initial-advertise-peer-urls=http://{peer}",
        f"--initial-cluster=default=http://{peer}",
    ]
    with served(command, lambda: _etcd_healthy(client)), _etcd_client(client) as (cycle, how):
        yield Subject("etcd", cycle, ops=3), how


def _etcd_healthy(address: str) -> bool:
    host, _, port = address.partition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=2)
    try:
        connection.request("GET", "/health")
        return b'"true"' in connection.getresponse().read()
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


@contextlib.contextmanager
def _etcd_client(address: str) -> Iterator[tuple[Callable[[], None], str]]:
    try:
        import grpc
    except ImportError:
        with _etcd_by_json(address) as cycle:
            yield cycle, "JSON gateway, one kept connection (grpcio, not installed, is faster)"
    else:
        with _etcd_by_grpc(grpc, address) as cycle:
            yield cycle, "gRPC, one channel, keep-alives on one stream"


@contextlib.contextmanager
def _etcd_by_json(address: str) -> Iterator[Callable[[], None]]:
    host, _, port = address.partition(":")
    connection = http.client.HTTPConnection(host, int(port))
    connection.connect()
    connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    headers = {"Content-Type": "application/json"}
    key = base64.b64encode(b"gpu-0").decode()
    absent = [{"key": key, "target": "CREATE", "create_revision": 0}]

    def post(path: str, body: dict[str, object]) -> dict[str, Any]:
        connection.request("POST", path, json.dumps(body).encode(), headers)
        answer = connection.getresponse()
        text = answer.read()
        assert answer.status == 200, text
        return json.loads(text)  # type: ignore[no-any-return]

    def cycle() -> None:
        lease = post("/v3/lease/grant", {"TTL": TTL_S})["ID"]
        put = {"request_put": {"key": key, "value": key, "lease": lease}}
        assert post("/v3/kv/txn", {"compare": absent, "success": [put]})["succeeded"]
        assert post("/v3/lease/keepalive", {"ID": lease})["result"]["TTL"] == str(TTL_S)
        post("/v3/lease/revoke", {"ID": lease})

    try:
        yield cycle
    finally:
        connection.close()


@contextlib.contextmanager
def _etcd_by_grpc(grpc: Any, address: str) -> Iterator[Callable[[], None]]:
    """The messages are few and small, so they are written by hand: no generated classes between us and the wire."""
    channel = grpc.insecure_channel(address)
    grant = channel.unary_unary("/etcdserverpb.Lease/LeaseGrant", None, None)
    revoke = channel.unary_unary("/etcdserverpb.Lease/LeaseRevoke", None, None)
    txn = channel.unary_unary("/etcdserverpb.KV/Txn", None, None)
    asked: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    alive = channel.stream_stream("/etcdserverpb.Lease/LeaseKeepAlive", None, None)(iter(asked.get, None))
    grant_request = _field(1, TTL_S)
    key_absent = _field(1, _field(2, 1) + _field(3, b"gpu-0") + _field(5, 0))  # create revision = 0
    put_start = _field(1, b"gpu-0") + _field(2, b"holder")

    def cycle() -> None:
        lease = _fields(grant(grant_request))[2]
        assert isinstance(lease, int)
        named = _field(1, lease)
        put = _field(2, _field(2, put_start + _field(3, lease)))
        assert _fields(txn(key_absent + put)).get(2) == 1
        asked.put(named)
        assert _fields(next(alive)).get(3) == TTL_S
        revoke(named)

    try:
        yield cycle
    finally:
        asked.put(None)
        channel.close()


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    out.append(number)
    return bytes(out)


def _field(number: int, value: int | bytes) -> bytes:
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    return _varint(number << 3 | 2) + _varint(len(value)) + value


def _fields(message: bytes) -> dict[int, int | bytes]:
    """Only the two wire types etcd uses in these answers."""
    found: dict[int, int | bytes] = {}
    at = 0

    def varint() -> int:
        nonlocal at
        shift = number = 0
        while True:
            byte = message[at]
            at += 1
            number |= (byte & 127) << shift
            if byte < 128:
                return number
            shift += 7

    while at < len(message):
        tag = varint()
        value = varint()
        if tag & 7 == 2:
            found[tag >> 3] = message[at : at + value]
            at += value
        else:
            found[tag >> 3] = value
    return found


# --- Redis ---------------------------------------------------------------------------------------------------

_RENEW = "if redis.call('get',KEYS[1])==ARGV[1] then return redis.call('pexpire',KEYS[1],ARGV[2]) else return 0 end"
_DELETE = "if redis.call('get',KEYS[1])==ARGV[1] then return redis.call('del',KEYS[1]) else return 0 end"


@contextlib.contextmanager
def redis(place: Path, *, durable: bool) -> Iterator[tuple[Subject, str]]:
    """SET NX PX, a scripted renewal, a scripted delete."""
    server = program("redis-server", "redis-server")
    try:
        import redis as client
        from redis.utils import HIREDIS_AVAILABLE
    except ImportError:
        raise NotInstalled("not installed: pip install redis") from None
    folder = folder_for(place, "redis")
    path = folder / "socket"
    command = [server, "--port", "0", "--unixsocket", str(path), "--dir", str(folder), "--save", ""]
    command += ["--appendonly", "yes", "--appendfsync", "always"] if durable else ["--appendonly", "no"]
    with served(command, path.exists):
        connection = client.Redis(unix_socket_path=str(path))
        renew, delete = connection.register_script(_RENEW), connection.register_script(_DELETE)
        numbers = itertools.count(1)
        keys = ["gpu-0"]

        def cycle() -> None:
            token = str(next(numbers))
            assert connection.set("gpu-0", token, nx=True, px=TTL_S * 1000)
            assert renew(keys=keys, args=[token, TTL_S * 1000]) == 1
            assert delete(keys=keys, args=[token]) == 1

        try:
            how = "Unix socket, " + ("hiredis" if HIREDIS_AVAILABLE else "hiredis not installed")
            what = "appendfsync always" if durable else "nothing written: compare with relaxed only"
            yield Subject("Redis AOF always" if durable else "Redis volatile", cycle, ops=3), f"{what}; {how}"
        finally:
            connection.close()


# --- without a server ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def file_lock(place: Path) -> Iterator[tuple[Subject, str]]:
    try:
        from filelock import FileLock
    except ImportError:
        raise NotInstalled("not installed: pip install filelock") from None
    lock = FileLock(str(place / "gpu-0.lock"))

    def cycle() -> None:
        lock.acquire()
        lock.release()

    yield Subject("filelock", cycle, ops=2), "acquire and release only: no ttl, no epoch, nothing durable"


@contextlib.contextmanager
def raw_disk(place: Path) -> Iterator[tuple[Subject, str]]:
    """The limit: one page of a file that was grown before, and its fdatasync."""
    page, pages = os.urandom(4096), 2048
    fd = os.open(place / "raw", os.O_CREAT | os.O_RDWR, 0o600)
    os.write(fd, b"\1" * (len(page) * pages))
    os.fsync(fd)
    offsets = itertools.cycle(range(0, len(page) * pages, len(page)))

    def cycle() -> None:
        os.pwrite(fd, page, next(offsets))
        os.fdatasync(fd)

    try:
        yield Subject("raw fdatasync", cycle, ops=1), "4 KiB in a pre-grown file: the limit"
    finally:
        os.close(fd)
