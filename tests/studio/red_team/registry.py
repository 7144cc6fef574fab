"""What an attack is, and how each is tried: in a process of its own, for a few seconds.

In files without pytest and without sublet: their text is sent into a session and imported there. An attack
returns what it got hold of, in words; nothing, or an error, is that it did not succeed.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

SECONDS_MOST = 20
_CALLS = {
    "x86_64": {"clone": 56, "request_key": 249, "perf_event_open": 298, "kcmp": 312, "reboot": 169}
    | {"bpf": 321, "userfaultfd": 323},
    "aarch64": {"clone": 220, "request_key": 218, "perf_event_open": 241, "kcmp": 272, "reboot": 142}
    | {"bpf": 280, "userfaultfd": 282},
}
_ALIKE = {"io_uring_setup": 425, "pidfd_getfd": 438}
libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Attack:
    name: str
    sentence: str
    run: Callable[[Mapping[str, Any]], Any]
    #: Who it succeeds for, because nothing is in the way: 'service', the service's own user in no session,
    #: 'user', a plain one, or 'neighbour', in the session of whom it is tried on.
    control: str = "service"
    is_bomb: bool = False


ATTACKS: dict[str, Attack] = {}
Function = Callable[[Mapping[str, Any]], Any]


def attack(
    name: str, sentence: str, *, control: str = "service", is_bomb: bool = False
) -> Callable[[Function], Function]:
    def add(function: Function) -> Function:
        assert name not in ATTACKS, name
        ATTACKS[name] = Attack(name, sentence, function, control, is_bomb)
        return function

    return add


def call(name: str, *arguments: Any) -> int:
    """A function of the C library; raises its error."""
    ctypes.set_errno(0)
    result = int(getattr(libc, name)(*arguments))
    if result < 0:
        raise OSError(ctypes.get_errno(), name)
    return result


def system_call(name: str, *arguments: Any) -> int:
    """A call that the C library has no function for."""
    return call("syscall", {**_CALLS[os.uname().machine], **_ALIKE}[name], *arguments)


def tried(names: Iterable[str], facts: Mapping[str, Any], *, as_uid: int = 0) -> dict[str, str]:
    """What each got hold of; '' for nothing."""
    return {name: _alone(ATTACKS[name], facts, as_uid) for name in names}


def _alone(wanted: Attack, facts: Mapping[str, Any], as_uid: int) -> str:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(reader)
            os.setpgid(0, 0)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(SECONDS_MOST)
            if as_uid and wanted.control == "user":
                os.setgroups([])
                os.setresgid(as_uid, as_uid, as_uid)
                os.setresuid(as_uid, as_uid, as_uid)
            got = wanted.run(facts)
            os.write(writer, json.dumps(str(got)[:300] if got else "").encode())
        except BaseException:
            pass
        finally:
            os._exit(0)
    os.close(writer)
    os.waitpid(pid, 0)
    with contextlib.suppress(OSError):
        os.killpg(pid, signal.SIGKILL)  # what it started and left
    os.set_blocking(reader, False)
    said = b""
    with contextlib.suppress(BlockingIOError):
        while part := os.read(reader, 4096):
            said += part
    os.close(reader)
    return str(json.loads(said)) if said else ""
