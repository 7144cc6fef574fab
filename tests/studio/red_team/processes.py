"""Attacks on processes, on memory that is shared, and on rights."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import glob
import os
import resource
import select
import signal
import subprocess
from collections.abc import Mapping
from typing import Any

from tests.studio.red_team.registry import attack, call, libc, system_call

Facts = Mapping[str, Any]
_NEW_USER, _NEW_MOUNTS = 0x10000000, 0x00020000
_DETACH, _CREATE, _EXCLUSIVE = 2, 0o1000, 0o2000


class _Vector(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("size", ctypes.c_size_t))


def _anybody(facts: Facts) -> list[int]:
    return [facts["victim"], facts["their_worker"]]


@attack("environments", "find a secret in the environment of any process")
def _(facts: Facts) -> Any:
    found = []
    for path in glob.glob("/proc/[0-9]*/environ"):
        with contextlib.suppress(OSError), open(path, "rb") as file:
            if facts["secret"].encode() in file.read():
                found.append(path)
    return found


@attack("command lines", "find a secret among the arguments of any process")
def _(facts: Facts) -> Any:
    found = []
    for path in glob.glob("/proc/[0-9]*/cmdline"):
        with contextlib.suppress(OSError), open(path, "rb") as file:
            if facts["argument_secret"].encode() in file.read():
                found.append(path)
    return found


@attack("processes seen", "see that processes of others exist, by their start")
def _(facts: Facts) -> Any:
    with open(f"/proc/{facts['victim']}/stat") as file:
        return file.read().split()[21] == facts["victim_started"] and "the service's process"


@attack("memory file", "read another process's memory by /proc")
def _(facts: Facts) -> Any:
    with open(f"/proc/{facts['victim']}/mem", "rb", buffering=0) as file:
        file.seek(facts["address"])
        return facts["secret"].encode() in file.read(len(facts["secret"])) and "its secret"


@attack("memory read", "read another process's memory by process_vm_readv")
def _(facts: Facts) -> Any:
    return _moved(facts, "process_vm_readv") == facts["secret"].encode() and "its secret"


@attack("memory written", "write another process's memory by process_vm_writev")
def _(facts: Facts) -> Any:
    return _moved(facts, "process_vm_writev") and "its memory"


def _moved(facts: Facts, function: str) -> bytes:
    size = len(facts["secret"])
    here = ctypes.create_string_buffer(facts["secret"].encode(), size)
    if function == "process_vm_readv":
        here = ctypes.create_string_buffer(size)
    own = _Vector(ctypes.addressof(here), size)
    theirs = _Vector(facts["address"], size)
    arguments = (ctypes.byref(own), ctypes.c_ulong(1), ctypes.byref(theirs), ctypes.c_ulong(1))
    call(function, facts["victim"], *arguments, ctypes.c_ulong(0))
    return here.raw


@attack("traced", "attach to another process as its debugger")
def _(facts: Facts) -> Any:
    call("ptrace", 0x4206, facts["victim"], None, None)
    return "attached"


@attack("descriptor taken", "take an open file out of another process")
def _(facts: Facts) -> Any:
    held = os.pidfd_open(facts["victim"])
    return system_call("pidfd_getfd", held, 0, 0) and "its standard input"


@attack("signal", "signal a process of the service or of another tenant")
def _(facts: Facts) -> Any:
    found = []
    for pid in _anybody(facts):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, 0)
            found.append(pid)
    return found


@attack("signal by handle", "hold a process by descriptor and signal it")
def _(facts: Facts) -> Any:
    found = []
    for pid in _anybody(facts):
        with contextlib.suppress(OSError):
            signal.pidfd_send_signal(os.pidfd_open(pid), 0)
            found.append(pid)
    return found


@attack("priority of others", "make another process wait behind all")
def _(facts: Facts) -> Any:
    os.setpriority(os.PRIO_PROCESS, facts["victim"], 1)
    return "its priority"


@attack("processors of others", "say on which processors another process runs")
def _(facts: Facts) -> Any:
    os.sched_setaffinity(facts["victim"], os.sched_getaffinity(facts["victim"]))
    return "its processors"


@attack("limits of others", "change the limits of another process")
def _(facts: Facts) -> Any:
    was = resource.prlimit(facts["victim"], resource.RLIMIT_NICE)
    resource.prlimit(facts["victim"], resource.RLIMIT_NICE, was)
    return "its limits"


@attack("compared", "learn by kcmp what two processes share")
def _(facts: Facts) -> Any:
    return system_call("kcmp", os.getpid(), facts["victim"], 1, 0, 0) >= 0 and "whether memory is shared"


@attack("seen through counters", "count what another process does")
def _(facts: Facts) -> Any:
    event = (ctypes.c_uint64 * 16)(1 | 128 << 32, 1)
    return system_call("perf_event_open", event, facts["victim"], -1, -1, 0) >= 0 and "a counter on it"


@attack("System V memory", "attach a segment of shared memory of others")
def _(facts: Facts) -> Any:
    return call("shmget", facts["sysv_key"], 0, 0) >= 0 and "a segment"


@attack("System V queue", "open a message queue of others")
def _(facts: Facts) -> Any:
    return call("msgget", facts["sysv_key"], 0) >= 0 and "a queue"


@attack("System V semaphores", "open semaphores of others")
def _(facts: Facts) -> Any:
    return call("semget", facts["sysv_key"], 0, 0) >= 0 and "semaphores"


@attack(
    "neighbour's System V memory",
    "attach a segment that another tenant's code made for everybody",
    control="neighbour",
)
def _(facts: Facts) -> Any:
    return call("shmget", facts["their_sysv_key"], 0, 0) >= 0 and "their segment"


@attack("POSIX queue", "open a message queue of others by its name")
def _(facts: Facts) -> Any:
    return call("mq_open", facts["queue"].encode(), os.O_RDONLY) >= 0 and "a queue"


@attack("keyring", "find a key of the service's account")
def _(facts: Facts) -> Any:
    return system_call("request_key", b"user", facts["key"].encode(), None, -4) >= 0 and "a key"


@attack("keys listed", "list the keys of the machine that it may see")
def _(facts: Facts) -> Any:
    with open("/proc/keys") as file:
        return [line for line in file if facts["key"] in line]


@attack("root again", "become root by asking")
def _(facts: Facts) -> Any:
    os.setresuid(0, 0, 0)
    return os.getuid() == 0 and "root"


@attack("somebody else", "become another tenant by asking")
def _(facts: Facts) -> Any:
    os.setresuid(facts["their_uid"], facts["their_uid"], facts["their_uid"])
    return "their uid"


@attack("setuid helper", "gain rights from a program that gives them to whoever starts it", control="user")
def _(facts: Facts) -> Any:
    said = subprocess.run([facts["helper"]], capture_output=True, text=True).stdout
    return "euid=0(" in said and said


@attack("new user namespace", "become root of a namespace of its own", control="user")
def _(facts: Facts) -> Any:
    call("unshare", _NEW_USER)
    return "a user namespace"


@attack("cloned namespace", "start a process in a user namespace of its own", control="user")
def _(facts: Facts) -> Any:
    child = system_call("clone", ctypes.c_ulong(_NEW_USER | signal.SIGCHLD), None, None, None, None)
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    return "a process in one"


@attack("cover taken off", "take the covers off in a namespace of its own, and read the ledger")
def _(facts: Facts) -> Any:
    with contextlib.suppress(OSError):
        call("unshare", _NEW_USER | _NEW_MOUNTS)
    for place in (facts["home"], "/tmp", "/run"):
        for _ in range(3):
            libc.umount2(place.encode(), _DETACH)
    return os.path.exists(facts["ledger"]) and "the ledger"


@attack("mount", "mount something")
def _(facts: Facts) -> Any:
    call("unshare", _NEW_MOUNTS)
    call("mount", b"none", b"/", b"none", ctypes.c_ulong(1 << 18 | 16384), None)
    call("mount", b"tmpfs", b"/mnt", b"tmpfs", ctypes.c_ulong(0), None)
    return "a file system"


@attack("other mounts", "enter the mounts of the first process")
def _(facts: Facts) -> Any:
    call("setns", os.open(f"/proc/{facts['first']}/ns/mnt", os.O_RDONLY), 0)
    return os.path.exists(facts["ledger"]) and "the ledger"


@attack("other root", "change its root folder")
def _(facts: Facts) -> Any:
    os.chroot("/")
    return "its root"


@attack("kernel program", "load a program into the kernel")
def _(facts: Facts) -> Any:
    code = ctypes.create_string_buffer(b"\xb7" + bytes(7) + b"\x95" + bytes(7))
    license_name = ctypes.create_string_buffer(b"GPL")
    fields = (ctypes.c_uint64 * 16)(1 | 2 << 32, ctypes.addressof(code), ctypes.addressof(license_name))
    return system_call("bpf", 5, fields, 128) >= 0 and "a BPF program"


@attack("faults held up", "handle the kernel's own faults, to hold it up at will")
def _(facts: Facts) -> Any:
    return system_call("userfaultfd", os.O_CLOEXEC) >= 0 and "a userfaultfd for the kernel's faults"


@attack("ring", "have the kernel do what a filter would refuse, by io_uring")
def _(facts: Facts) -> Any:
    return system_call("io_uring_setup", 4, (ctypes.c_uint32 * 30)()) >= 0 and "a ring"


@attack("restart", "restart the machine")
def _(facts: Facts) -> Any:
    """With numbers that mean nothing: whoever may is told so, and nothing happens."""
    try:
        system_call("reboot", 0, 0, 0, 0)
    except OSError as e:
        return e.errno == errno.EINVAL and "the right to"
    return "it"


@attack("host's name", "rename the machine")
def _(facts: Facts) -> Any:
    name = os.uname().nodename.encode()
    call("sethostname", name, len(name))
    return "its name"


@attack("as late as the service", "be ended no sooner than the service when memory is out")
def _(facts: Facts) -> Any:
    for score in ("500", "0"):
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write(score)
    return "the service's score"


@attack("first to run", "run before everybody, in real time")
def _(facts: Facts) -> Any:
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    return "a real-time priority"


@attack("higher priority", "raise its own priority")
def _(facts: Facts) -> Any:
    os.setpriority(os.PRIO_PROCESS, 0, -5)
    return "it"


@attack("core dump", "have its memory dumped by the host's own program for it", control="service")
def _(facts: Facts) -> Any:
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (hard, hard))
    return hard != 0 and "a limit that allows it"


# --- bombs, each of a bounded size ---


@attack("fork bomb", "start four hundred processes where it may have three hundred", is_bomb=True)
def _(facts: Facts) -> Any:
    pids = []
    with contextlib.suppress(OSError):
        for _ in range(400):
            pid = os.fork()
            if pid == 0:
                signal.alarm(10)
                signal.pause()
                os._exit(0)
            pids.append(pid)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return len(pids) == 400 and "all of them"


@attack("memory bomb", "touch 700 MiB where it may have 512", is_bomb=True)
def _(facts: Facts) -> Any:
    kept = [bytearray(b"x") * (4 << 20) for _ in range(175)]
    return len(kept) == 175 and "all of it"


@attack("memory of many", "touch 700 MiB in seven processes, none of which has much", is_bomb=True)
def _(facts: Facts) -> Any:
    go_on, told = os.pipe()
    has_it, says = os.pipe()
    children = []
    for _ in range(7):
        pid = os.fork()
        if pid == 0:
            signal.alarm(15)
            os.close(told)
            os.close(has_it)
            kept = bytearray(b"x") * (100 << 20)
            os.write(says, b"x")
            os.read(go_on, 1)
            os._exit(int(not kept))
        children.append(pid)
    os.close(says)
    for _ in children:  # a part of them may be ended before the others have theirs
        if not select.select([has_it], [], [], 5)[0] or not os.read(has_it, 1):
            break
    os.close(told)
    ended = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
    return ended == [0] * 7 and "all of it"


@attack("shared memory bomb", "fill 500 MiB of /dev/shm", is_bomb=True)
def _(facts: Facts) -> Any:
    path = f"/dev/shm/bomb-{os.getpid()}"
    try:
        with open(path, "wb") as file:
            for _ in range(125):
                file.write(b"x" * (4 << 20))
        return "all of it"
    finally:
        os.unlink(path)


@attack("disk bomb", "write one file of 200 MiB where 100 are allowed", is_bomb=True)
def _(facts: Facts) -> Any:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    path = f"{os.environ.get('TMPDIR', '/tmp')}/bomb-{os.getpid()}"
    try:
        with open(path, "wb") as file:
            for _ in range(50):
                file.write(b"x" * (4 << 20))
        return "all of it"
    finally:
        os.unlink(path)
