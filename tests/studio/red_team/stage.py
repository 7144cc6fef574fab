"""Where attacks are tried: a real service with two tenants, and what lies about on its host.

Rules of this file:
- `ann` is the neighbour, `ben` attacks. Everything a session must not reach is really there: the same
  attacks, run by the service's own user without a session, get hold of it.
- What is made on the host has names and keys of its own, and goes with the stage.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import sublet
from sublet.processes.sandbox.tenant_sandbox import needed
from tests.processes.conftest import REPOSITORY
from tests.studio.red_team.registry import libc
from tests.studio.test_isolation import Contained
from tests.waiting import wait_until

LIMITS = {
    "SUBLET_WORKER_MEMORY": "512MiB",
    "SUBLET_WORKER_PROCESSES": "300",
    "SUBLET_SCRATCH_LIMIT": "100MiB",
}
MODULES = ("registry", "files", "processes", "network")
_HERE = Path(__file__).parent
_REMOVE, _CREATE, _ANYBODY = 0, 0o1000, 0o666
_VICTIM = """
import ctypes, os, sys
kept = ctypes.create_string_buffer(os.environ["A_SECRET"].encode())
held = open(sys.argv[1], "rb")
print(ctypes.addressof(kept), flush=True)
sys.stdin.read()
"""
_NEIGHBOUR = """
import ctypes, json, os, socket
open("their-file", "w").write({secret!r})
listening = socket.socket(socket.AF_UNIX)
listening.bind("\\0" + {abstract!r})
listening.listen(1000)
by_port = socket.socket()
by_port.bind(("127.0.0.1", 0))
by_port.listen(1000)
segment = ctypes.CDLL(None).shmget({key}, 4096, 0o1666)
print(json.dumps({{"scratch": os.getcwd(), "uid": os.getuid(), "port": by_port.getsockname()[1]}}))
"""


class LimitedService(Contained):
    """As `sublet serve` is started where bombs are expected."""

    @property
    def environment(self) -> dict[str, str]:
        return super().environment | LIMITS

    def token(self, tenant: str, *options: str) -> str:
        made = json.loads(self.sublet("tenant", "token", "add", tenant, "--json", *options))
        return str(made["token"])


@contextmanager
def service(prefix: Sequence[str], uid: int) -> Iterator[LimitedService]:
    """In a home that no cover of /tmp hides."""
    place = "/opt" if os.access("/opt", os.W_OK) else "/var/tmp"
    with tempfile.TemporaryDirectory(prefix="sublet-red-", dir=place, ignore_cleanup_errors=True) as name:
        home = Path(name) / "home"
        home.mkdir(mode=0o700)
        os.chmod(name, 0o755)
        if uid != os.getuid():
            os.chown(home, uid, uid)
        made = LimitedService(home, list(prefix))
        try:
            yield made
        finally:
            made.close()


class Screen:
    """What a session's code prints."""

    def __init__(self, capsys: Any) -> None:
        self._capsys = capsys

    def of(self, session: sublet.Session, code: str) -> str:
        self._capsys.readouterr()
        session.run_code(code)
        return str(self._capsys.readouterr().out).strip()


def sent(names: Sequence[str], facts: Mapping[str, Any]) -> str:
    """The attacks as source for a session: their files are written there and imported."""
    files = {f"{module}.py": (_HERE / f"{module}.py").read_text() for module in MODULES}
    return f"""
import json, os, sys
where = os.path.join(os.getcwd(), "attacks")
package = os.path.join(where, "tests", "studio", "red_team")
os.makedirs(package, exist_ok=True)
for folder in (package, os.path.dirname(package), os.path.dirname(os.path.dirname(package))):
    open(os.path.join(folder, "__init__.py"), "w").close()
for name, text in {files!r}.items():
    with open(os.path.join(package, name), "w") as file:
        file.write(text)
if where not in sys.path:
    sys.path.insert(0, where)
    for known in [m for m in sys.modules if m == "tests" or m.startswith("tests.")]:
        del sys.modules[known]
import tests.studio.red_team.registry as registry
import tests.studio.red_team.files, tests.studio.red_team.processes, tests.studio.red_team.network
print(json.dumps(registry.tried({list(names)!r}, json.loads({json.dumps(json.dumps(facts))}))))
"""


def without_a_boundary(names: Sequence[str], facts: Mapping[str, Any], as_uid: int) -> dict[str, str]:
    """The same attacks by the service's own user, in no session."""
    code = f"""
import json, sys
import tests.studio.red_team.registry as registry
import tests.studio.red_team.files, tests.studio.red_team.processes, tests.studio.red_team.network
names, facts = json.load(sys.stdin)
print(json.dumps(registry.tried(names, facts, as_uid={as_uid})))
"""
    own = {k: v for k, v in os.environ.items() if not k.startswith("SUBLET_")}
    own.pop("TMPDIR", None)
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=json.dumps([list(names), dict(facts)]),
        capture_output=True,
        text=True,
        timeout=300,
        cwd=str(REPOSITORY),
        env=own | {"PYTHONPATH": f"{REPOSITORY}/src:{REPOSITORY}"},
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


@contextmanager
def belongings(made: LimitedService, ann: sublet.Session, screen: Screen) -> Iterator[dict[str, Any]]:
    """Everything that attacks are after, of the service's user (root) and of the neighbour."""
    word = secrets.token_hex(6)
    secret, key = f"a-secret-{word}", 0x40000000 + secrets.randbelow(1 << 29)
    ann.save({"kept": 1})
    with ExitStack() as stack:
        theirs = json.loads(
            screen.of(ann, _NEIGHBOUR.format(secret=secret, abstract=f"ann-{word}", key=key + 1))
        )
        open_folder = Path(made.home).parent / "open"
        open_folder.mkdir()
        open_folder.chmod(0o777)
        helper = open_folder.parent / "helper"
        shutil.copy("/usr/bin/id", helper)
        helper.chmod(0o4755)
        (made.home / "removable").write_text("x")
        for place in (Path("/tmp") / f"left-{word}", Path("/dev/shm") / f"left-{word}"):
            place.write_text(secret)
            place.chmod(0o644)
            stack.callback(place.unlink)
        in_run = Path("/run") / f"sublet-red-{word}.sock"
        for name in (str(in_run), f"\0red-{word}"):
            listening = stack.enter_context(socket.socket(socket.AF_UNIX))
            listening.bind(name)
            listening.listen(1000)
        in_run.chmod(0o666)
        stack.callback(in_run.unlink)
        local = stack.enter_context(socket.socket())
        local.bind(("127.0.0.1", 0))
        local.listen(1000)
        stack.enter_context(_shared(key, f"/red-{word}"))
        stack.enter_context(_key(f"red-{word}"))
        victim = stack.enter_context(_victim(made, secret, f"argument-{word}"))
        on_the_way = [Path(place) for place in needed()]
        yield {
            "home": str(made.home),
            "ledger": str(made.home / "ledger.db"),
            "store": str(made.home / "store"),
            "secret": secret,
            "argument_secret": f"argument-{word}",
            "their_file": f"{theirs['scratch']}/their-file",
            "their_scratch": theirs["scratch"],
            "their_uid": theirs["uid"],
            "their_worker": _pid_of(theirs["uid"]),
            "their_abstract": f"ann-{word}",
            "their_sysv_key": key + 1,
            "their_port": theirs["port"],
            "handle": _handle_of(made.home / "ledger.db"),
            "held_by": "/proc/self/fd",
            "first": 1,
            "account_home": str(Path.home()),
            "account_names": [
                name
                for name in os.listdir(Path.home())
                if not any(p.is_relative_to(Path.home() / name) for p in on_the_way)
            ],
            "package": str(Path(sublet.__file__).parent),
            "in_tmp": f"/tmp/left-{word}",
            "shm_name": f"left-{word}",
            "for_everybody": str(open_folder),
            "removable": str(made.home / "removable"),
            "sockets": [str(p) for p in (made.home / "run").iterdir() if p.is_socket()],
            "abstract": f"red-{word}",
            "in_run": str(in_run),
            "sysv_key": key,
            "queue": f"/red-{word}",
            "key": f"red-{word}",
            "helper": str(helper),
            "port": made.port,
            "local_port": local.getsockname()[1],
            **victim,
        }


@contextmanager
def _victim(made: LimitedService, secret: str, argument: str) -> Iterator[dict[str, Any]]:
    """A process of the service's user that knows a secret."""
    process = subprocess.Popen(
        [sys.executable, "-c", _VICTIM, str(made.home / "ledger.db"), argument],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "A_SECRET": secret},
    )
    try:
        assert process.stdout is not None
        address = int(process.stdout.readline())
        started = Path(f"/proc/{process.pid}/stat").read_text().split()[21]
        yield {"victim": process.pid, "address": address, "victim_started": started}
    finally:
        process.kill()
        process.wait()


@contextmanager
def _shared(key: int, queue: str) -> Iterator[None]:
    """Segments, queues and semaphores that every user of the machine may open."""
    memory = libc.shmget(key, 4096, _CREATE | _ANYBODY)
    messages = libc.msgget(key, _CREATE | _ANYBODY)
    semaphores = libc.semget(key, 1, _CREATE | _ANYBODY)
    before = os.umask(0)
    by_name = libc.mq_open(queue.encode(), os.O_RDWR | os.O_CREAT, 0o666, None)
    os.umask(before)
    assert min(memory, messages, semaphores, by_name) >= 0
    try:
        yield
    finally:
        libc.shmctl(memory, _REMOVE, None)
        libc.msgctl(messages, _REMOVE, None)
        libc.semctl(semaphores, 0, _REMOVE)
        libc.mq_unlink(queue.encode())


@contextmanager
def _key(name: str) -> Iterator[None]:
    """A key in the keyring of the service's user."""
    numbers = {"x86_64": (248, 250), "aarch64": (217, 219)}[os.uname().machine]
    made = libc.syscall(numbers[0], b"user", name.encode(), b"secret", ctypes.c_size_t(6), -4)
    try:
        yield
    finally:
        if made >= 0:
            libc.syscall(numbers[1], 3, made)


def _handle_of(path: Path) -> str:
    """The bytes by which the kernel knows a file, as hex."""
    held = ctypes.create_string_buffer(8 + 128)
    held[0:4] = (128).to_bytes(4, "little")
    mount = ctypes.c_int()
    assert libc.name_to_handle_at(-100, str(path).encode(), held, ctypes.byref(mount), 0) == 0
    return held.raw.hex()


def _pid_of(uid: int) -> int:
    found: list[int] = []

    def seen() -> bool:
        for name in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                if os.stat(f"/proc/{name}").st_uid == uid:
                    found.append(int(name))
        return bool(found)

    wait_until(seen)
    return found[0]
