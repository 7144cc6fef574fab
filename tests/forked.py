"""Python processes without the wait for their imports: each is forked from one that has them all, and is otherwise a process like any other.

`Forked(command, …)` is `subprocess.Popen` and `run(command, …)` is `subprocess.run` with its output captured, for commands that are
`[sys.executable, "-c", code, …]`, `[sys.executable, "-m", module, …]` or `[sys.executable, program, …]`: its own pid, environment, folder and streams, killed and waited for as
usual, ended as an interpreter ends. What differs: its parent is the process it was forked from, and its modules are there already. Tests of a start itself, of `exec` or of a parent use `subprocess`. `spawn_detached` is
`sublet.processes.daemonize`'s for wardens and zygotes, whose start is most of what many a test would cost; every forked process has it.

Rules of this file:
- The process that is forked runs nothing but imports, has one thread, and leaves with the one that started it.
- It has no torch unless the command says so: with torch, a fork takes five times as long. Nor the studio's service, but for `serve`.
- A child ends as an interpreter does: threads waited for, exit functions run, its own objects let go, streams flushed.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import io
import json
import os
import random
import re
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import types
import uuid
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import sublet
from sublet.machine.private_files import make_private_folder
from sublet.processes.daemonize import open_log
from sublet.processes.daemonize import spawn_detached as _started_detached

ROOT = Path(__file__).parents[1]
#: The library that this process runs: with a seeded bug it is a copy, and whoever is forked must have that bug too.
SOURCE = Path(sublet.__file__).resolve().parents[1]


def _modules_below(*packages: str) -> list[str]:
    found = [p for name in packages for p in sorted((SOURCE / "sublet" / name).rglob("[a-z]*.py"))]
    return [".".join(path.relative_to(SOURCE).with_suffix("").parts) for path in found]


#: Imported ahead, where it is there.
MODULES = (
    "numpy",
    "psycopg",
    "sublet",
    *_modules_below("cli", "ledger", "store", "notice_bus"),
    "sublet.testing.clock",
    *(
        f"sublet.devices.{name}"
        for name in ("cuda", "host", "opencl", "opening", "worker_session", "session")
    ),
    "sublet.processes.worker.zygote",
    # What every zygote of a home imports.
    "sublet.functions.on_gpu",
    "sublet.notebook.cells.inside_cell",
)
WITH_TORCH = (
    *MODULES,
    "torch",
    "torch._dynamo",  # an optimizer imports it with its first step
    "torch.distributed",
    "torch.nn.parallel",
    "safetensors.torch",
    "tests.training.jobs",
    "tests.training.test_shim",
)
WITH_TRAINERS = (
    *WITH_TORCH,
    "transformers.trainer",
    "transformers.models.gpt2.modeling_gpt2",
    "tests.training.hf_jobs",
    "lightning.pytorch",
    "tests.training.lightning_jobs",
)
WITH_STUDIO = (
    *MODULES,
    "uvicorn.loops.uvloop",
    "uvicorn.protocols.http.httptools_impl",
    *_modules_below("studio"),
)
#: A notebook's own process, and what its first cells import.
WITH_KERNEL = (
    *MODULES,
    "ipykernel_launcher",
    "ipykernel.kernelapp",
    "ipykernel.debugger",
    "IPython.core.completerlib",
    "IPython.extensions.storemagic",
    "pygments.formatters.terminal256",
    "stack_data",
    "tornado.platform.asyncio",
    "sublet.notebook.extension",
    "sublet.notebook.magics",
    "sublet.processes.worker.workers",
)
WITH_CUDA = ("sublet", "sublet.devices.cuda", "sublet.devices.session", "sublet.devices.selftest")
_LIMIT = 1 << 18
_START = "import sys; from tests.forked import serve, become; become(serve(int(sys.argv[1]), *sys.argv[2:]))"
#: In a command, or a program: that it will import them.
_TORCH = r"torch|\.(pt|safetensors)$"
_TRAINERS = r"import (lightning|transformers)|from transformers"
#: What a process makes of these is decided when it starts.
_AT_START = ("LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONHOME", "PYTHONWARNINGS")


# --- in the process that is forked ---------------------------------------------------------------------------


def serve(number: int, address: str, *modules: str) -> dict[str, Any]:
    """Returns in a child only. Asked by the tests through the socket, and by other children at the address."""
    gc.disable()  # looking through what only grows is a fifth of the time
    for name in modules:
        with contextlib.suppress(ImportError):
            import_module(name)
    gc.enable()
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False  # torch takes its tables of kernels apart, in each child: it is half of what a short one takes
    if "sublet.machine.plugins" in sys.modules:
        sys.modules["sublet.machine.plugins"].installed("sublet.ledgers")  # read once, for all of them
    gc.collect()
    gc.freeze()
    link = socket.socket(fileno=number)
    children = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    children.bind("\0" + address)
    children.listen(100)
    wake, woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(woken)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for those who were started
    tellers: dict[int, int] = {}
    while True:
        ready, _, _ = select.select([link, wake, children], [], [])
        if wake in ready:
            os.read(wake, 1000)
        _reap(tellers)
        if link in ready:
            data, fds, _, _ = socket.recv_fds(link, _LIMIT, 4)
            if not data:
                os._exit(0)
        elif children in ready:
            asking, _ = children.accept()
            with asking:
                data, fds, _, _ = socket.recv_fds(asking, _LIMIT, 4)
            if len(fds) != 4:
                continue  # killed between the two
        else:
            continue
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            asked = json.loads(data)
            if asked["session"]:
                os.setsid()
            # Now it can be looked at: its process group is what it will stay.
            with contextlib.suppress(BrokenPipeError):
                os.write(fds[3], struct.pack("<i", os.getpid()))
            for fd in (wake, woken, fds[3], *tellers.values()):
                os.close(fd)
            link.close()
            children.close()
            return {**asked, "fds": fds[:3]}
        for fd in fds[:3]:
            os.close(fd)
        tellers[pid] = fds[3]


def _reap(tellers: dict[int, int]) -> None:
    while tellers:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        teller = tellers.pop(pid)
        with contextlib.suppress(OSError):
            os.write(teller, struct.pack("<i", status))
        os.close(teller)


def become(asked: dict[str, Any]) -> None:
    """What a new interpreter does with its command line."""
    for number, fd in enumerate(asked["fds"]):
        os.dup2(fd, number)
    for fd in asked["fds"]:
        os.close(fd)
    os.chdir(asked["cwd"])
    os.environ.clear()
    os.environ.update(asked["env"])
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if asked["interruptible"]:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    _, *words = asked["command"]
    at_once = words[0] == "-u"
    how, what, args = _taken_apart(words[1:] if at_once else words)
    at_once = at_once or bool(asked["env"].get("PYTHONUNBUFFERED"))
    sys.stdin = sys.__stdin__ = open(0, closefd=False, encoding="utf-8")  # noqa: SIM115
    written = open(1, "wb", 0 if at_once else -1, closefd=False)  # noqa: SIM115
    sys.stdout = sys.__stdout__ = io.TextIOWrapper(written, encoding="utf-8", write_through=at_once)
    sys.stderr = sys.__stderr__ = open(2, "w", 1, closefd=False, encoding="utf-8", errors="backslashreplace")  # noqa: SIM115
    _reseed()
    from sublet.machine import failpoints

    failpoints.arm_from_environment()
    global _of_the_tests, _at_start
    _of_the_tests, _at_start = asked["origins"], asked["at_start"]
    for module in [m for m in sys.modules.values() if vars(m).get("spawn_detached") is _started_detached]:
        module.spawn_detached = spawn_detached  # type: ignore[attr-defined]
    if asked["children_too"]:
        subprocess.Popen = _ForkedIfItCanBe  # type: ignore[misc]
    sys.argv, sys.orig_argv = [how or what, *args], list(asked["command"])
    sys.path[:0] = [p for p in _python_path(asked["env"]) if p not in sys.path]
    sys.path.insert(0, {"-c": "", "-m": asked["cwd"]}.get(how, os.path.dirname(os.path.realpath(what))))
    main = types.ModuleType("__main__")
    status: object = 0
    try:
        if how == "-m":
            runpy.run_module(what, run_name="__main__", alter_sys=True)
        else:
            sys.modules["__main__"] = main
            if not how:
                main.__file__ = what
            text = what if how else Path(what).read_bytes()
            exec(compile(text, "<string>" if how else what, "exec"), main.__dict__)
    except SystemExit as e:
        status = e.code
    except BaseException as e:
        sys.excepthook(type(e), e, e.__traceback__)
        status = 1
        if isinstance(e, KeyboardInterrupt):
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
    _end(main, status)


def _reseed() -> None:
    """Or what nobody seeded would be the same in each of them, and a job that loses it on the way would end as if it had not."""
    random.seed()
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()


def _taken_apart(words: Sequence[str]) -> tuple[str, str, list[str]]:
    """`-c` and the code, `-m` and the module, or the file of a program; and its arguments."""
    how = words[0] if words[0] in ("-c", "-m") else ""
    what, *args = words[1:] if how else words
    return how, what, args


def _python_path(environment: Mapping[str, str]) -> list[str]:
    return [p for p in environment.get("PYTHONPATH", "").split(os.pathsep) if p]


def _end(main: types.ModuleType, status: object) -> None:
    """What an interpreter does last, without taking every imported module apart: that is most of the time of a short command."""
    if isinstance(status, str):
        print(status, file=sys.stderr)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    main.__dict__.clear()
    try:
        with contextlib.suppress(ValueError):  # closed by the program
            sys.stdout.flush()
    except OSError as e:
        with contextlib.suppress(OSError):
            print(f"{type(e).__name__}: {e}", file=sys.stderr)
        status = 120
    os._exit(status & 255 if isinstance(status, int) else int(status is not None))


# --- in the tests --------------------------------------------------------------------------------------------


class Origin:
    """One process to fork from."""

    def __init__(self, modules: Iterable[str], **environment: str) -> None:
        self.link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LIMIT)
        self.address = f"sublet-tests-{uuid.uuid4().hex}"
        self.started_by = os.getpid()
        path = os.pathsep.join([str(SOURCE), str(ROOT)])
        self.process = subprocess.Popen(
            [sys.executable, "-c", _START, str(theirs.fileno()), self.address, *modules],
            env={**os.environ, **environment, "PYTHONPATH": path, "SUBLET_FAILPOINTS": ""},
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            cwd="/",
        )
        theirs.close()

    def ask(self, data: bytes, fds: Sequence[int]) -> None:
        socket.send_fds(self.link, [data], fds)

    def end(self) -> None:
        """Told by the socket's end, whoever else has inherited it."""
        self.link.shutdown(socket.SHUT_RDWR)
        self.link.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class _Elsewhere:
    """The tests' own, asked by one that was forked."""

    def __init__(self, address: str) -> None:
        self.address = address

    def ask(self, data: bytes, fds: Sequence[int]) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as link:
            link.connect("\0" + self.address)
            link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LIMIT)
            socket.send_fds(link, [data], fds)


#: In a process that was forked: where those of the tests are asked, the plain one always.
_of_the_tests: dict[str, str] = {}
_at_start = {name: os.environ.get(name, "") for name in _AT_START}
_origins: dict[Any, Origin] = {}
_starting = threading.Lock()


@atexit.register
def _end_all() -> None:
    for origin in _origins.values():
        if origin.process.poll() is None and origin.started_by == os.getpid():
            origin.end()


def _origin(modules: Sequence[str], **environment: str) -> Origin:
    key = (modules, tuple(environment.items()))
    with _starting:
        found = _origins.get(key)
        if found is None or (found.started_by == os.getpid() and found.process.poll() is not None):
            found = _origins[key] = Origin(modules, **environment)
        return found


#: What each kind has imported, and with what in its environment. Of one thread with torch, for those that it starts are not there in a child.
_KINDS: dict[str, tuple[Sequence[str], dict[str, str]]] = {
    "plain": (MODULES, {}),
    "torch": (WITH_TORCH, {"OMP_NUM_THREADS": "1"}),
    "trainers": (WITH_TRAINERS, {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}),
    "studio": (WITH_STUDIO, {}),
    "kernel": (WITH_KERNEL, {}),
}


def origin_of(kind: str) -> Origin | _Elsewhere:
    """The tests' own. A process that was forked starts none: it asks the plain one for what is not there."""
    if _of_the_tests:
        return _Elsewhere(_of_the_tests.get(kind, _of_the_tests["plain"]))
    modules, environment = _KINDS[kind]
    return _origin(modules, **environment)


def plain() -> Origin | _Elsewhere:
    return origin_of("plain")


def with_torch() -> Origin | _Elsewhere:
    return origin_of("torch")


def with_trainers() -> Origin | _Elsewhere:
    return origin_of("trainers")


def with_studio() -> Origin | _Elsewhere:
    """For its service: what it imports is half of what a start of it costs."""
    return origin_of("studio")


def warm() -> None:
    """Start the plain one, before whoever forks this process needs it."""
    plain()


def _running() -> dict[str, str]:
    """The address of each that a forked process can ask."""
    if _of_the_tests:
        return _of_the_tests
    keys = {kind: (modules, tuple(environment.items())) for kind, (modules, environment) in _KINDS.items()}
    return {kind: _origins[key].address for kind, key in keys.items() if key in _origins}


def _kind_for(words: Sequence[str], folder: Path) -> str:
    """By what a command, or the program it names, says that it will import."""
    programs = [folder / word for word in words if word.endswith(".py")]
    words = [*words, *(p.read_text(errors="replace") for p in programs if p.is_file())]
    if words[:3] == ["-m", "sublet", "serve"]:
        return "studio"
    if words[:2] == ["-m", "ipykernel_launcher"]:
        return "kernel"
    if any(re.search(_TRAINERS, word) for word in words):
        return "trainers"
    return "torch" if any(re.search(_TORCH, word) for word in words) else "plain"


class Forked(subprocess.Popen[str]):
    """Implements what `subprocess.Popen` does on POSIX, by asking an origin instead of by `exec`."""

    def __init__(
        self,
        args: Sequence[str],
        *,
        origin: Origin | _Elsewhere | None = None,
        children_too: bool = False,
        **options: Any,
    ) -> None:
        """`children_too`: what it starts by `subprocess` is forked as well, where that can be."""
        self._from, self._children_too = origin, children_too
        super().__init__(args, **options)

    def _execute_child(self, args: Sequence[str], *rest: Any) -> None:  # type: ignore[override]
        _, _, _, _, cwd, env, _, _, shell, p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite = rest[:15]
        command = [str(word) for word in args]
        words = command[2:] if command[1] == "-u" else command[1:]
        assert command[0] == sys.executable, command
        assert words[0] in ("-c", "-m") or words[0].endswith(".py"), command
        assert not shell
        environment = dict(os.environ if env is None else env)
        libraries = environment.get("LD_LIBRARY_PATH", "")
        warm()
        if self._from is not None:
            origin = self._from
        elif libraries != _at_start["LD_LIBRARY_PATH"] and not _of_the_tests:
            origin = _origin(WITH_CUDA, LD_LIBRARY_PATH=libraries)
        else:
            origin = origin_of(_kind_for(words, Path(cwd or ".")))
        asked = {
            "command": command,
            "cwd": os.fspath(cwd or Path.cwd()),
            "env": environment,
            "session": bool(rest[20]),
            "interruptible": signal.getsignal(signal.SIGINT) is not signal.SIG_IGN,
            "origins": _running(),
            "at_start": _at_start,
            "children_too": self._children_too,
        }
        self._told, teller = os.pipe2(os.O_CLOEXEC)
        streams = [given if given >= 0 else own for own, given in enumerate((p2cread, c2pwrite, errwrite))]
        try:
            origin.ask(json.dumps(asked).encode(), [*streams, teller])
        finally:
            os.close(teller)
            self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)  # type: ignore[attr-defined]
        pid = os.read(self._told, 4)
        assert pid, "the process to fork from is gone"
        [self.pid] = struct.unpack("<i", pid)
        self._child_created = True

    def _status(self) -> int:
        data = os.read(self._told, 4)
        os.close(self._told)
        return int(struct.unpack("<i", data)[0]) if data else int(signal.SIGKILL)

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        with self._waitpid_lock:  # type: ignore[attr-defined]
            if self.returncode is None and select.select([self._told], [], [], 0)[0]:
                self._handle_exitstatus(self._status())  # type: ignore[attr-defined]
        return self.returncode

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        if wait_flags and not select.select([self._told], [], [], 0)[0]:
            return 0, 0
        return self.pid, self._status()

    def leave(self) -> int:
        """To itself: nobody will wait for it. Its pid."""
        os.close(self._told)
        self.returncode = 0
        return self.pid


class _ForkedIfItCanBe(subprocess.Popen):  # type: ignore[type-arg]
    """In place of `subprocess.Popen` in a process whose children are forked too."""

    def __new__(cls, args: Any, *rest: Any, **options: Any) -> Any:
        words = [] if isinstance(args, str | bytes | os.PathLike) else [os.fspath(word) for word in args]
        plain = not rest and not options.get("shell") and not options.keys() & _ONLY_BY_EXEC
        environment = options.get("env") or os.environ
        same = all(environment.get(name, "") == value for name, value in _at_start.items())
        if plain and same and _is_python(words):
            return Forked(words, children_too=True, **options)
        return _started(args, *rest, **options)


_started = subprocess.Popen
#: Options of `subprocess.Popen` that a fork does not know.
_ONLY_BY_EXEC = {
    "pass_fds",
    "preexec_fn",
    "executable",
    "user",
    "group",
    "extra_groups",
    "umask",
    "process_group",
}


def _is_python(words: Sequence[str]) -> bool:
    if words[:1] != [sys.executable] or len(words) < 2:
        return False
    [first, *_] = words[2:] if words[1] == "-u" else words[1:]
    return first in ("-c", "-m") or first.endswith(".py")


@contextlib.contextmanager
def kernels() -> Iterator[None]:
    """Those that jupyter_client starts here meanwhile."""
    with mock.patch.object(import_module("jupyter_client.launcher"), "Popen", Forked):
        yield


def spawn_detached(
    command: Sequence[str], environment: Mapping[str, str], log: Path, folder: str = "/"
) -> int:
    """In a session of its own, and not in our tree."""
    if any(environment.get(name, "") != value for name, value in _at_start.items()):
        return _started_detached(command, environment, log, folder)
    make_private_folder(log.parent)
    with os.fdopen(open_log(log), "ab") as lines:
        return Forked(
            command,
            env=environment,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=lines,
            stderr=lines,
            start_new_session=True,
        ).leave()


def run(
    command: Sequence[str],
    *,
    origin: Origin | _Elsewhere | None = None,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    timeout: float | None = None,
    check: bool = False,
    children_too: bool = False,
) -> subprocess.CompletedProcess[str]:
    pipe = subprocess.PIPE
    with Forked(
        command,
        origin=origin,
        children_too=children_too,
        env=env,
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=pipe,
        stderr=pipe,
        text=True,
    ) as child:
        try:
            out, error = child.communicate(timeout=timeout)
        except BaseException:  # the test's own time limit too: leaving the block waits for the child
            child.kill()
            raise
    assert not check or child.returncode == 0, error
    return subprocess.CompletedProcess(command, child.returncode, out, error)
