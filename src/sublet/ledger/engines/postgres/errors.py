"""Translates psycopg's errors into the ledger's own, and says which may be tried again."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from sublet.core.errors import (
    BadInput,
    Disconnected,
    InvariantBroken,
    Misconfigured,
    NotDurable,
    SchemaMismatch,
)
from sublet.ledger.engines.postgres.connection import CONNECTIONS
from sublet.ledger.engines.postgres.psycopg_import import pg, psycopg
from sublet.machine.failpoints import ConnectionDropped


class StandbyAnswered(psycopg.OperationalError):
    """The server that answered takes no writes."""


class RetryTransaction(Exception):
    """The transaction may be run again. `lost` means that the connection is gone and the outcome unknown."""

    def __init__(self, what: str = "", *, lost: bool, remedy: str = "") -> None:
        self.lost = lost
        self._what = what or "the ledger's PostgreSQL server does not answer; nothing is assumed to be held"
        self._remedy = remedy

    def gave_up(self) -> Disconnected:
        return Disconnected(self._what, remedy=self._remedy)


_LOCKED = (
    "others held the ledger's rows in PostgreSQL all the time; nothing was changed",
    "retry; if it stays, look on the server for a session that holds locks (pg_stat_activity)",
)
_STANDBY = (
    "the PostgreSQL server that answers is a standby, or set to read only; nothing was changed, and "
    "nothing is assumed to be held",
    "name the primary in SUBLET_LEDGER, or all of them: postgresql://user@one,two/database finds the one "
    "that takes writes",
)
_FULL = (
    "the ledger's PostgreSQL server has no connection left for this process; nothing was changed, and "
    "nothing is assumed to be held",
    "raise max_connections on the server, or let each process open fewer: ?sublet_connections=N in "
    "SUBLET_LEDGER "
    f"({CONNECTIONS} unless told, and two for wake-ups)",
)
#: What a server says that is full, or a standby. A connection that was never made has no error code.
_SAYS_FULL = ("too many clients", "too many connections", "remaining connection slots")
_SAYS_STANDBY = ("session is read-only", "server is in hot standby mode")


@contextlib.contextmanager
def translated() -> Iterator[None]:
    try:
        yield
    except (pg.SerializationFailure, pg.DeadlockDetected, pg.LockNotAvailable, pg.UniqueViolation) as e:
        raise RetryTransaction(_LOCKED[0], lost=False, remedy=_LOCKED[1]) from e
    except (StandbyAnswered, pg.ReadOnlySqlTransaction) as e:
        # During a failover the old primary may answer for a moment, or the new one before it was promoted.
        raise RetryTransaction(_STANDBY[0], lost=True, remedy=_STANDBY[1]) from e
    except (pg.InvalidPassword, pg.InvalidAuthorizationSpecification, pg.InvalidCatalogName) as e:
        raise Misconfigured(
            "the PostgreSQL server refused the ledger's credentials or database",
            remedy="check the user, password and database in SUBLET_LEDGER",
        ) from e
    except pg.InsufficientPrivilege as e:
        raise Misconfigured(
            "the PostgreSQL server accepts the ledger's user but denies access to the ledger's tables",
            remedy="let it own the schema: GRANT CREATE ON DATABASE … for the first start; in a schema that "
            "somebody else made, GRANT USAGE ON SCHEMA, and SELECT, INSERT, UPDATE, DELETE ON ALL TABLES, "
            "USAGE ON ALL SEQUENCES, EXECUTE ON ALL FUNCTIONS in it",
        ) from e
    except (pg.UndefinedTable, pg.UndefinedFunction, pg.InvalidSchemaName) as e:
        raise SchemaMismatch("the database has no ledger in it", remedy="run 'sublet migrate'") from e
    except (pg.CheckViolation, pg.NotNullViolation) as e:
        raise InvariantBroken(f"the ledger refused an impossible change: {e.diag.constraint_name}") from e
    except psycopg.DataError as e:
        raise BadInput("a text holds something PostgreSQL cannot store, such as a NUL") from e
    except pg.DiskFull as e:
        raise NotDurable("the ledger's disk is full; the change was not made") from e
    except psycopg.ProgrammingError as e:
        if "connection option" in str(e) or "conninfo" in str(e) or "URI" in str(e):
            raise Misconfigured(
                "SUBLET_LEDGER is not a PostgreSQL address",
                remedy="write postgresql://user@host/database",
            ) from e
        raise
    except (
        psycopg.OperationalError,
        pg.AdminShutdown,
        pg.IdleInTransactionSessionTimeout,
        ConnectionDropped,
    ) as e:
        # A server that restarts, a dropped connection: another try may reach it.
        if any(words in str(e) for words in _SAYS_FULL):
            raise RetryTransaction(_FULL[0], lost=False, remedy=_FULL[1]) from e
        if any(words in str(e) for words in _SAYS_STANDBY):
            raise RetryTransaction(_STANDBY[0], lost=True, remedy=_STANDBY[1]) from e
        if "password authentication" in str(e) or "does not exist" in str(e):
            raise Misconfigured(
                "the PostgreSQL server refused the ledger's credentials or database",
                remedy="check the user, password and database in SUBLET_LEDGER",
            ) from e
        raise RetryTransaction(lost=True) from e
