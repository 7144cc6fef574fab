"""What keeps the sessions of two tenants apart, and who is admitted where it is missing (I1).

Rules of this file:
- `NEEDED` is the whole table. A boundary counts when a worker reported that it is in force; nothing is
  assumed from the kind of machine.
- Where one is missing, a session is code that can reach what the service can reach: the ledger, its tokens
  and every checkpoint. So the tenant that is there stays alone in that ledger, also after its session ended.
- `none` is said by name, by an operator whose users trust each other. It never lets a worker be root.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from sublet.core.errors import BadInput, NotIsolated
from sublet.core.studio.worker_limits import Resource, bounds

# The words of a sandboxed worker's containment. A receipt has them too.
HIDDEN_HOME = "hidden home"
READ_ONLY = "read-only system"
SCOPED = "own sockets"
OWN_IPC = "own ipc"
FILTERED = "filtered calls"
OWN_UID = "own uid"
SAME_UID = "same uid"


class IsolationMode(Enum):
    REQUIRED = "required"
    NONE = "none"


def parse_mode(text: str) -> IsolationMode:
    try:
        return IsolationMode(text.strip().lower() or IsolationMode.REQUIRED.value)
    except ValueError:
        raise BadInput(
            f"isolation is required or none, not {text[:40]!r}",
            remedy="none is for people who trust each other; say nothing otherwise",
        ) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Boundary:
    name: str
    in_force: Callable[[Sequence[str]], bool]  # judged by the words of a worker's containment
    without: str
    remedy: str


NEEDED = (
    Boundary(
        name="own uid",
        in_force=lambda words: OWN_UID in words,
        without="a session's code is the service's own user to the kernel",
        remedy="run the service as root with CHOWN, SETUID, SETGID and SYS_ADMIN, so that each tenant gets a "
        "user of its own",
    ),
    Boundary(
        name="hidden home",
        in_force=lambda words: HIDDEN_HOME in words,
        without="a session's code sees the folders of the service and of other sessions",
        remedy="allow namespaces: SYS_ADMIN, and a seccomp profile that lets unshare and mount pass",
    ),
    Boundary(
        name="limited processes",
        in_force=lambda words: bounds(Resource.PROCESSES, words),
        without="a session can start processes until the machine can start no more",
        remedy="give the service the cgroup controller pids (under systemd: Delegate=yes and "
        "DelegateSubgroup=sublet-service)",
    ),
    Boundary(
        name="limited memory",
        in_force=lambda words: bounds(Resource.MEMORY, words),
        without="a session can take memory until the machine has none",
        remedy="give the service the cgroup controller memory (under systemd: Delegate=yes and "
        "DelegateSubgroup=sublet-service)",
    ),
)


def words_of(containment: str) -> list[str]:
    return [word.strip() for word in containment.split(",") if word.strip()]


def missing(words: Sequence[str]) -> list[Boundary]:
    return [boundary for boundary in NEEDED if not boundary.in_force(words)]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostIsolation:
    """What a host does for a tenant's session: tried with a worker when the service starts."""

    mode: IsolationMode
    words: tuple[str, ...] = ()  # what the worker reported
    refused: str = ""  # why no worker of a tenant could be started
    remedy: str = ""
    elsewhere: bool = False  # workers run on other hosts, and each is judged when it starts

    @property
    def missing(self) -> list[Boundary]:
        return [] if self.elsewhere else missing(self.words)

    @property
    def separates(self) -> bool:
        """Whether every boundary was seen in force here."""
        return not (self.elsewhere or self.missing or self.refused)

    @property
    def admits_others(self) -> bool:
        """Whether a second tenant's session may be opened."""
        return self.mode is IsolationMode.NONE or self.elsewhere or self.separates

    @property
    def summary(self) -> str:
        if self.elsewhere:
            return "tenants are kept apart where their sessions run; each session is checked when it starts"
        if self.refused:
            return f"no session can run here: {self.refused}"
        if self.separates:
            return f"tenants are kept apart by {', '.join(self.words)}"
        lacking = ", ".join(boundary.name for boundary in self.missing)
        if self.mode is IsolationMode.NONE:
            return (
                f"tenants are NOT kept apart (no {lacking}): isolation is none by name, and their sessions "
                "can read and harm each other"
            )
        return f"one tenant only: this host has no {lacking}, so a second tenant's sessions are refused"

    @property
    def advice(self) -> list[str]:
        """What an operator can do, one line for each boundary that is missing."""
        if self.remedy:
            return [self.remedy]
        return [f"no {b.name}: {b.without}; {b.remedy}" for b in self.missing]


NOT_CHECKED = HostIsolation(mode=IsolationMode.REQUIRED)


def refusal(lacking: Iterable[Boundary]) -> NotIsolated:
    """A second tenant is not let in."""
    names = ", ".join(boundary.name for boundary in lacking)
    return NotIsolated(
        f"this studio cannot keep two tenants apart (it has no {names}), and another tenant has sessions in "
        "it; nothing was started, and checkpoints and other sessions are as they were",
        remedy="ask whoever runs the studio for one of your own; 'sublet serve' prints what is missing, and "
        "--isolation none lets in people who trust each other",
    )


def admission(mode: IsolationMode, containment: str) -> NotIsolated | None:
    """The refusal of a worker that reported this containment, if another tenant has sessions in its
    ledger; None if it may be given to anybody."""
    lacking = missing(words_of(containment))
    return refusal(lacking) if lacking and mode is IsolationMode.REQUIRED else None
