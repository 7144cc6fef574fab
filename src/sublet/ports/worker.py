"""What holds a lease and what can be called, as the process that asked for it sees it.

Rules of this port:
- A worker of this machine is started before its lease is asked for, because the lease names it as its holder.
  One placed elsewhere is started after the grant, on the host of its devices, and is then seated. Neither
  runs anything until `begin`.
- A command's supervisor enforces every deadline it was told, alone. The run that waits here may be stopped or
  killed; the command still ends.
- A worker that is gone raises `WorkerLost` from whatever is asked of it; `ending` says why, in words.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from sublet.core.leasing.lease import Holder
from sublet.core.notice import Notice
from sublet.ports.ledger import LeaseKey

#: Arguments of one call.
Call = tuple[Sequence[Any], Mapping[str, Any]]


class Screen(Protocol):
    """Where a cell's output appears, in the order in which it was made. Called by whoever waits for the
    cell."""

    def text(self, stream: str, text: str) -> None:
        """`stream` is stdout or stderr."""

    def show(self, what: Mapping[str, Any]) -> None:
        """A display, an update of one, a result, or a request to clear them: see
        `notebook/cells/inside_cell.py`."""


#: Anything `memoryview` takes.
Part = bytes | bytearray | memoryview


class CallSink(Protocol):
    """Where a sealed call's output goes, in order, and who answers what it asks. Called by whoever waits for
    the call. Nothing it is given was unpickled, and nothing it returns will be here."""

    @property
    def interrupted(self) -> bool:
        """Whether the call is to stop. Asked once, when it begins: until then `Callee.interrupt` has no call
        to stop."""

    def text(self, stream: str, text: str) -> None:
        """`stream` is stdout or stderr."""

    def show(self, display: bytes) -> None:
        """A display, a result, an update or a request to clear them: one JSON object, as the worker wrote it,
        not parsed."""

    def ask(self, head: Mapping[str, Any], parts: Sequence[memoryview]) -> tuple[bool, Sequence[Part]]:
        """A question in the middle of the call. (False, []): nobody answers, and the call is interrupted."""


class LeaseHolder(Protocol):
    """What holds a lease: a worker, a command, a kernel, or the members of a gang."""

    @property
    def holder(self) -> Holder: ...

    @property
    def containment(self) -> str: ...

    @property
    def here(self) -> bool:
        """Whether it runs on this machine."""

    @property
    def ending(self) -> str:
        """Why it ended; '' while it lives."""

    @property
    def host_lost(self) -> str:
        """Why its host is taken for gone, for one that is not here; '' while it is not."""

    def begin(self, lease_id: str, epoch: int, environment: Mapping[str, str]) -> None:
        """Called once, after the lease was granted and armed."""

    def arm(self, stop_us: int, kill_us: int, *, confirm: bool = False) -> None:
        """Set the deadlines: no new device work after `stop_us`, no process after `kill_us`. Called at the
        grant and at every renewal."""

    def warn(self) -> None:
        """Say that the lease will go soon, so that whatever runs there may save and stop."""

    def end(self, why: str) -> None:
        """Returns when it is gone, or has been told and did not answer in time."""


@runtime_checkable
class HasScratch(Protocol):
    """A worker whose files lie in a folder of its own on this machine."""

    @property
    def holder(self) -> Holder: ...

    @property
    def scratch(self) -> str:
        """The folder, which goes with the worker; '' when there is none."""


@runtime_checkable
class Callee(Protocol):
    """What can be called: functions run there, and their results come back."""

    @property
    def launches(self) -> int:
        """How many kernels its sealed calls said they launched."""

    def call(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run it there; what it prints appears here, what it raises is raised here."""

    def call_many(self, function: Callable[..., Any], calls: Sequence[Call]) -> list[tuple[bool, Any]]:
        """Several calls in one trip: (True, result) or (False, exception) each."""

    def call_shown(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        screen: Screen,
        answer: Callable[[Any], Any],
    ) -> Any:
        """A call whose output goes to a screen, and which may ask the caller something while it runs. An
        interrupt is passed on, and the call's own answer to it is returned."""

    def call_sealed(
        self, target: str, parts: Sequence[Part], sink: CallSink
    ) -> tuple[bool, list[memoryview]]:
        """Run "module:function" there with bytes; (True, what it returned) or (False, [JSON of kind, text and
        trace]). Nothing that comes from the worker is unpickled here. An interrupt is passed on, and the
        call's own answer to it is returned."""

    def interrupt(self) -> None:
        """From any thread: KeyboardInterrupt in the call that runs. Nothing when none does."""


class Worker(LeaseHolder, Callee, Protocol):
    """A process that holds a lease and can be called."""


class Workers(Protocol):
    def start(self) -> Worker:
        """Called when a lease is about to be asked for that a worker will hold."""

    def warm(self) -> None:
        """Called in the background before the first worker is wanted: prepare what makes starting one
        quick."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandExit:
    """How a command ended."""

    code: int | None  # as a shell shows it: 128 + the signal; None: nobody saw it
    why: str = ""  # what its supervisor ended it for, or told it to leave for; '' when it left by itself
    killed: bool = False  # at a deadline, because it had not left
    lease_over: bool = False  # that deadline was its lease's; or its host is gone, and its lease with it


class Command(LeaseHolder, Protocol):
    def entrust(self, key: LeaseKey) -> None:
        """Called after the grant, before `begin`: put the right to commit where the command finds it."""

    def drain(self, notice: Notice) -> None:
        """Called when the notice has been written here: TERM to its main process now, to the rest later, KILL
        to everything at the deadline. On another machine, the notice is written there too."""

    def left(self) -> CommandExit | None:
        """None while it runs. Called whenever `fileno` is readable."""

    def fileno(self) -> int: ...

    def steps(self) -> tuple[int, int]:
        """The step it worked on last, and the last one it committed; zeros for a command that never reported
        any."""

    def unfinished(self) -> bool:
        """Called when it has left: whether it reported that it leaves its steps because of a warning."""
