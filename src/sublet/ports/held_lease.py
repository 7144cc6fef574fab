"""A lease as whoever works with it sees it, wherever it is held: in this process, or in a studio.

Rules of this port:
- What `on_gpu`, a notebook's cells and its panel ask of a lease, and nothing else.
- Releasing twice is fine. `status` is 'active', 'revoking' or 'ended', as far as this process can be sure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from sublet.core.notice import Notice
from sublet.ports.ledger import Answer
from sublet.ports.worker import Call, Screen


class HeldLease(Protocol):
    warm_us: int  # for so long after the last use it is kept
    yielded: str  # why it was given back while nobody used it

    @property
    def id(self) -> str: ...

    @property
    def tenant(self) -> str: ...

    @property
    def devices(self) -> tuple[str, ...]: ...

    @property
    def vram_bytes(self) -> int: ...

    @property
    def granted_at(self) -> int:
        """By the ledger's clock."""

    @property
    def status(self) -> str: ...

    @property
    def notice(self) -> Notice | None: ...

    @property
    def seconds_left(self) -> float: ...

    @property
    def seconds_to_go(self) -> float:
        """Until it is gone, if nobody uses it and nobody asks for it."""

    @property
    def here(self) -> bool:
        """Whether its work runs on this machine, where this process's folder and environment mean
        something."""

    def run(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any: ...

    def run_many(self, function: Callable[..., Any], calls: list[Call]) -> list[tuple[bool, Any]]: ...

    def run_shown(
        self, function: Callable[..., Any], args: Sequence[Any], screen: Screen, answer: Callable[[Any], Any]
    ) -> Any: ...

    def on_notice(self, callback: Callable[[Notice], None]) -> None: ...

    def keep_warm(self, then: Callable[[], None] = ...) -> None: ...

    def warn_worker(self) -> None:
        """Tell what runs in its worker that it will go soon."""

    def release(self, *, patience_us: int = ...) -> None: ...


class LeaseLook(Protocol):
    """Where the row of a lease is read: the ledger, or the studio that has one."""

    def __call__(self, lease_id: str, *, patience_us: int | None = None) -> Answer: ...
