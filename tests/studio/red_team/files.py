"""Attacks on files: the service's home, its ledger, other tenants' scratch, the system."""

from __future__ import annotations

import ctypes
import fcntl
import glob
import os
import socket
import stat
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.studio.red_team.registry import attack, call

Facts = Mapping[str, Any]


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read(64)


@attack("ledger read", "read the ledger's rows")
def _(facts: Facts) -> Any:
    return _read(facts["ledger"]).startswith(b"SQLite") and "the ledger's first page"


@attack("ledger write", "open the ledger for writing")
def _(facts: Facts) -> Any:
    return os.open(facts["ledger"], os.O_RDWR) and "a descriptor that writes"


@attack("ledger lock", "hold a lock that writers of the ledger need")
def _(facts: Facts) -> Any:
    with open(facts["ledger"], "rb") as file:
        fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB, 1, 1 << 29)
        return "a lock on it"


@attack("home listed", "list the service's home")
def _(facts: Facts) -> Any:
    return [name for name in os.listdir(facts["home"]) if name != "scratch"]


@attack("run files", "list the folder of sockets and keys")
def _(facts: Facts) -> Any:
    return os.listdir(f"{facts['home']}/run")


@attack("checkpoints", "list the store of every tenant's bytes")
def _(facts: Facts) -> Any:
    return os.listdir(facts["store"])


@attack("other scratch read", "read a file in another tenant's scratch folder")
def _(facts: Facts) -> Any:
    return facts["secret"].encode() in _read(facts["their_file"]) and "their file"


@attack("other scratch write", "write into another tenant's scratch folder")
def _(facts: Facts) -> Any:
    with open(f"{facts['their_scratch']}/planted", "w") as file:
        file.write("x")
    return "a file planted"


@attack("scratch folders listed", "list the folder of all scratch folders, to learn of others")
def _(facts: Facts) -> Any:
    return [n for n in os.listdir(os.path.dirname(facts["their_scratch"])) if n in facts["their_scratch"]]


@attack("through the first process", "go around the covers by the first process's root")
def _(facts: Facts) -> Any:
    return _read(f"/proc/{facts['first']}/root{facts['ledger']}") and "the ledger"


@attack("through a folder's descriptor", "climb with '..' from a descriptor of its own folder")
def _(facts: Facts) -> Any:
    here = os.open("/tmp", os.O_RDONLY | os.O_DIRECTORY)
    found = os.open(os.path.join("../" * 12, facts["ledger"].lstrip("/")), os.O_RDONLY, dir_fd=here)
    return os.read(found, 6) and "the ledger"


@attack("hard link", "make a name of its own for the ledger's file")
def _(facts: Facts) -> Any:
    target = f"{os.path.dirname(facts['ledger'])}/linked-{os.getpid()}"
    os.link(facts["ledger"], target)
    os.unlink(target)
    return "a second name"


@attack("file handle", "open the ledger by its handle, past every folder")
def _(facts: Facts) -> Any:
    handle = ctypes.create_string_buffer(bytes.fromhex(facts["handle"]))
    mount = os.open("/", os.O_RDONLY)
    found = call("open_by_handle_at", mount, handle, os.O_RDONLY)
    return os.read(found, 6) and "the ledger"


@attack("inherited descriptors", "find a descriptor of the service's that was left open")
def _(facts: Facts) -> Any:
    names = [f"{facts['held_by']}/{n}" for n in os.listdir(facts["held_by"])]
    found = [os.readlink(n) for n in names if os.path.islink(n)]
    return [t for t in found if t.startswith(facts["home"]) and "/scratch/" not in t]


@attack("password file", "read the system's passwords")
def _(facts: Facts) -> Any:
    return _read("/etc/shadow") and "/etc/shadow"


@attack("account's home", "list the home of the service's account")
def _(facts: Facts) -> Any:
    return [n for n in os.listdir(facts["account_home"]) if n in facts["account_names"]]


@attack("package planted", "put code where the service imports from")
def _(facts: Facts) -> Any:
    path = f"{facts['package']}/planted_by_a_tenant.py"
    with open(path, "w") as file:
        file.write("")
    os.unlink(path)
    return "a module beside sublet's own"


@attack("start-up file planted", "put a .pth file where every Python looks at its start")
def _(facts: Facts) -> Any:
    path = f"{next(p for p in sys.path if p.endswith('site-packages'))}/planted-by-a-tenant.pth"
    with open(path, "w") as file:
        file.write("")
    os.unlink(path)
    return "a file in site-packages"


@attack("system configuration", "write below /etc")
def _(facts: Facts) -> Any:
    path = f"/etc/planted-by-a-tenant-{os.getpid()}"
    os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    os.unlink(path)
    return path


@attack("shared temporary folder", "read what somebody else left in /tmp for everybody")
def _(facts: Facts) -> Any:
    return _read(facts["in_tmp"]) and "it"


@attack("folder for everybody", "write where anybody on the machine may write, as a message to others")
def _(facts: Facts) -> Any:
    path = f"{facts['for_everybody']}/left-{os.getpid()}"
    with open(path, "w") as file:
        file.write("x")
    return path


@attack("shared memory files", "read another's file in /dev/shm")
def _(facts: Facts) -> Any:
    return facts["secret"].encode() in _read(f"/dev/shm/{facts['shm_name']}") and "it"


@attack("block device", "read the disk below the file system")
def _(facts: Facts) -> Any:
    disks = [p for p in glob.glob("/dev/*") if stat.S_ISBLK(os.stat(p).st_mode)]
    return [p for p in disks if _opens(p)]


def _opens(path: str) -> bool:
    try:
        os.close(os.open(path, os.O_RDONLY))
        return True
    except OSError:
        return False


@attack("device made", "make a device file of the disk's or memory's numbers")
def _(facts: Facts) -> Any:
    path = f"{os.environ.get('TMPDIR', '/tmp')}/device-{os.getpid()}"
    os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 1))
    os.unlink(path)
    return path


@attack("kernel's addresses", "learn where the kernel lies, or open its memory")
def _(facts: Facts) -> Any:
    with open("/proc/kallsyms") as file:
        known = [file.readline()] if int(file.readline().split()[0], 16) else []
    return known + [p for p in ("/dev/mem", "/proc/kcore", "/dev/port") if _opens(p)]


@attack("kernel log", "read the kernel's log")
def _(facts: Facts) -> Any:
    return _opens("/dev/kmsg") and "/dev/kmsg"


@attack("kernel settings", "open a setting of the kernel for writing")
def _(facts: Facts) -> Any:
    os.close(os.open("/proc/sys/kernel/core_pattern", os.O_WRONLY))
    return "core_pattern"


@attack("control groups", "leave its group, or raise what it may use")
def _(facts: Facts) -> Any:
    places = glob.glob("/sys/fs/cgroup/*/cgroup.procs") + glob.glob("/sys/fs/cgroup/cgroup.procs")
    found = []
    for path in places:
        try:
            os.close(os.open(path, os.O_WRONLY))
            found.append(path)
        except OSError:
            continue
    return found


@attack("files watched", "be told by the kernel what happens in the service's home")
def _(facts: Facts) -> Any:
    fd = call("inotify_init1", os.O_NONBLOCK)
    call("inotify_add_watch", fd, f"{facts['home']}/run".encode(), 0x100)
    return "a watch on it"


@attack("ledger removed", "rename the ledger's neighbour files away")
def _(facts: Facts) -> Any:
    os.rename(facts["removable"], f"{facts['removable']}.x")
    os.rename(f"{facts['removable']}.x", facts["removable"])
    return "renamed and back"


@attack("service's sockets", "speak to the session host or the zygote, by socket")
def _(facts: Facts) -> Any:
    found = []
    for path in facts["sockets"]:
        for kind in (socket.SOCK_STREAM, socket.SOCK_SEQPACKET, socket.SOCK_DGRAM):
            with socket.socket(socket.AF_UNIX, kind) as sock:
                try:
                    sock.connect(path)
                    found.append(path)
                except OSError:
                    continue
    return found


@attack("abstract socket", "speak to a service that listens on a name without a file")
def _(facts: Facts) -> Any:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect("\0" + facts["abstract"])
    return "connected"


@attack("neighbour's abstract socket", "speak to a socket that another tenant's code listens on")
def _(facts: Facts) -> Any:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect("\0" + facts["their_abstract"])
    return "connected"


@attack("system bus", "speak to the machine's services in /run")
def _(facts: Facts) -> Any:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(facts["in_run"])
    return Path(facts["in_run"]).name
