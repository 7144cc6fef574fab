"""What a database must offer to carry the verbs, and how a verb is run on it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TypeVar

from sublet.core.errors import SubletError
from sublet.ledger.tx import Row, Tx
from sublet.ports.bell import Bell

T = TypeVar("T")


class Engine(Protocol):
    """Implemented in `engines/sqlite` and `engines/postgres`."""

    def write(self, work: Callable[[Tx], T], *, durable: bool, patience_us: int | None = None) -> T: ...
    def write_restored(self, work: Callable[[Tx, int], T]) -> T:
        """As a durable `write`, also on a ledger from the past, which is the ledger from then on. `work` is
        told the highest epoch that is known to have been granted."""

    def read(self, work: Callable[[Tx], T], *, patience_us: int | None = None) -> T: ...
    def at_once(self, work: Callable[[], T]) -> T:
        """Every `read` of this thread inside `work` belongs to one transaction."""

    def glance(self, sql: str, *params: object) -> Row | None:
        """Run one reading statement without a transaction, for what is asked at every request."""

    def confirm(self, sql: str, *params: object) -> Row | None:
        """As `glance`, and what it saw is on disk when it returns, so that it outlives a crash."""

    def now(self) -> int: ...
    def keep_stamp(self, folder: Path) -> None:
        """Keep in this folder what is known to have been granted, where nothing beside the ledger says so."""

    def ring(self, topics: set[str]) -> None: ...
    def bell(self) -> Bell: ...
    def barrier(self) -> None: ...
    def unstick(self) -> str: ...
    def describe(self) -> dict[str, str]: ...
    def close(self) -> None: ...


def raised(result: T | SubletError) -> T:
    """Raise a refusal. It leaves its transaction as a value, so that the transaction commits its journal
    row."""
    if isinstance(result, SubletError):
        raise result
    return result


class Verbs:
    """The one way from a verb to its transaction."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def _write(
        self, work: Callable[[Tx], T | SubletError], *, durable: bool, patience_us: int | None = None
    ) -> T:
        return raised(self.engine.write(work, durable=durable, patience_us=patience_us))

    def _read(self, work: Callable[[Tx], T | SubletError], *, patience_us: int | None = None) -> T:
        return raised(self.engine.read(work, patience_us=patience_us))
