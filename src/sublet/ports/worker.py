"""A leased worker, as the process that asked for it sees it.

Rules of this port:
- A worker of this machine is started before its lease is asked for, because the lease names it as its holder; one that is placed elsewhere
  after the grant, on the host of its devices, and is then seated. It runs nothing until `begin`.
- A worker that is gone raises `WorkerLost` from whatever is asked of it; `ending` says why, in words.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from sublet.core.lease import Holder

#: Arguments of one call.
Call = tuple[Sequence[Any], Mapping[str, Any]]


class Screen(Protocol):
    """Where a cell's output appears. Called in the order in which it was made, by whoever waits for the cell."""

    def text(self, stream: str, text: str) -> None:
        """`stream` is stdout or stderr."""

    def show(self, what: Mapping[str, Any]) -> None:
        """A display, an update of one, a result, or the wish to clear them: see `notebook/inside_cell.py`."""


#: Anything `memoryview` takes.
Part = bytes | bytearray | memoryview


class Sink(Protocol):
    """Where a sealed call's output goes, and who answers what it asks. Called by whoever waits for the call, in the order in which
    things were made. Nothing it is given was unpickled, and nothing it returns will be here."""

    @property
    def interrupted(self) -> bool:
        """The call is to stop. Asked once, when it begins: until then `Worker.interrupt` has no call to stop."""

    def text(self, stream: str, text: str) -> None:
        """`stream` is stdout or stderr."""

    def show(self, display: bytes) -> None:
        """A display, a result, an update or the wish to clear them: one JSON object, as the worker wrote it. It was not parsed here."""

    def ask(self, head: Mapping[str, Any], parts: Sequence[memoryview]) -> tuple[bool, Sequence[Part]]:
        """A question in the middle of the call. (False, []): nobody answers, and the call is interrupted."""


class Worker(Protocol):
    @property
    def holder(self) -> Holder: ...

    @property
    def containment(self) -> str: ...

    @property
    def here(self) -> bool:
        """It runs on this machine."""

    @property
    def launches(self) -> int:
        """How many kernels its sealed calls said they launched."""

    @property
    def ending(self) -> str:
        """Why it ended; '' while it lives."""

    @property
    def host_lost(self) -> str:
        """Why the host it ran on is taken for gone; '' while it is not. Asked of those that are not here."""

    def begin(self, lease_id: str, epoch: int, environment: Mapping[str, str]) -> None:
        """Called once, after the lease was granted and armed."""

    def arm(self, stop_us: int, kill_us: int, *, confirm: bool = False) -> None:
        """No new device work after the first, no process after the second. Called at the grant and at every renewal."""

    def warn(self) -> None:
        """The lease will go soon. Called when its holder hears so; whatever runs there may save and stop."""

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
        """A call whose output goes to a screen, and which may ask the caller something while it runs. An interrupt is passed on, and
        what the call then returns is returned: it says itself that it was interrupted."""

    def call_sealed(self, target: str, parts: Sequence[Part], sink: Sink) -> tuple[bool, list[memoryview]]:
        """Run "module:function" there with bytes; (True, what it returned) or (False, [JSON of kind, text and trace]). Nothing that comes
        from the worker is unpickled here. An interrupt is passed on, and the call's own answer to it is returned."""

    def interrupt(self) -> None:
        """From any thread: KeyboardInterrupt in the call that runs. Nothing when none does."""

    def end(self, why: str) -> None:
        """Returns when it is gone, or has been told and did not answer in time."""


class Workers(Protocol):
    def start(self) -> Worker:
        """Called when a lease is about to be asked for that a worker will hold."""

    def warm(self) -> None:
        """Called behind somebody's back, before the first is wanted: have ready what makes starting one quick."""
