"""A connection to the ledger's server with a fast path for hot verbs, and the options of its address.

Rules of this file:
- It uses psycopg's connection and adaptation of values. A hot verb skips the cursor and the generators it
  waits in, which cost the client three times as much as the rest.
- A statement is prepared once per connection. The server infers the types of its parameters: each is an
  argument of one of our functions, is compared with a column, or is cast. After a rollback, when psycopg has
  dropped every prepared statement, it is prepared again.
- No waiting function of libpq is called: it would block all other threads and hear no interrupt.
- An interrupt (Ctrl-C) ends the wait at once. The connection is then in an unknown state, and the pool drops
  it.
"""

from __future__ import annotations

import re
import select
from collections.abc import Sequence
from typing import Any

from psycopg.adapt import PyFormat, Transformer

from sublet.core.errors import BadInput
from sublet.ledger.engines.postgres.psycopg_import import pg, psycopg
from sublet.ledger.tx import Row

_ANSWERED = frozenset([psycopg.pq.ExecStatus.TUPLES_OK, psycopg.pq.ExecStatus.COMMAND_OK])

#: Of one process, durable and relaxed ones together; the bell has up to two more. The address can set another
#: number with `?sublet_connections=N`.
CONNECTIONS = 16
#: The kernel notices a server that is gone without a word (power, a cut cable). Otherwise a verb would wait
#: for a quarter of an hour.
SILENCE = {
    "keepalives_idle": 5,
    "keepalives_interval": 2,
    "keepalives_count": 3,
    "tcp_user_timeout": 10_000,
}
#: The server notices a client that is gone the same way. Otherwise it would keep a cut connection for two
#: hours.
SERVER_SILENCE = {f"tcp_{name.removeprefix('tcp_')}": str(value) for name, value in SILENCE.items()}


class LedgerConnection(psycopg.Connection[Row]):
    def __init__(self, pgconn: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(pgconn, *args, **kwargs)
        self._hot_names: dict[str, bytes] = {}
        self._hot_count = 0
        self._hot_values = Transformer(self)
        self._hot_answers = select.poll()
        self._hot_answers.register(pgconn.socket, select.POLLIN)

    def call(self, sql: str, params: Sequence[object]) -> list[Row]:
        """One statement, outside of any transaction; `%s` for its parameters, as psycopg has it."""
        try:
            return self._hot_call(sql, params)
        except pg.InvalidSqlStatementName:  # nothing was done
            self._hot_names.clear()
            return self._hot_call(sql, params)

    def _hot_call(self, sql: str, params: Sequence[object]) -> list[Row]:
        values = self._hot_values
        name = self._hot_names.get(sql) or self._hot_prepare(sql)
        self.pgconn.send_query_prepared(name, values.dump_sequence(params, [PyFormat.TEXT] * len(params)))
        result = self._hot_answer()
        values.set_pgresult(result)
        rows: list[Row] = values.load_rows(0, result.ntuples, tuple)
        return rows

    def _hot_prepare(self, sql: str) -> bytes:
        self._hot_count += 1
        name = b"sublet_%d" % self._hot_count
        first, *others = sql.split("%s")
        text = first + "".join(f"${number}{part}" for number, part in enumerate(others, 1))
        self.pgconn.send_prepare(name, text.encode())
        self._hot_answer()
        self._hot_names[sql] = name
        return name

    def _hot_answer(self) -> Any:
        server = self.pgconn
        while server.flush():  # more than fits: the server may want to be heard first
            ready, _, _ = select.select([server.socket], [server.socket], [])
            if ready:
                server.consume_input()
        result = None
        while (found := self._hot_result()) is not None:
            result = result or found
        if result is None:
            raise pg.OperationalError("the connection was lost")
        if result.status not in _ANSWERED:
            raise pg.error_from_result(result, self.info.encoding)
        return result

    def _hot_result(self) -> Any:
        """The next result, None after the last. It has arrived before it is asked for, because libpq would
        wait for it with every thread of this process stopped."""
        server = self.pgconn
        while server.is_busy():
            self._hot_answers.poll()
            server.consume_input()
        return server.get_result()


def _split_option(url: str, name: str) -> tuple[str, str | None]:
    """The address without one of our options, and the option's value."""
    found = re.search(rf"[?&]{name}=([^&]*)", url)
    if found is None:
        return url, None
    return re.sub(r"[?&]$", "", re.sub(rf"{name}=[^&]*&?", "", url)), found.group(1)


def split_url(url: str) -> tuple[str, str]:
    """The server's URL and our schema, from `?sublet_schema=NAME`."""
    url, schema = _split_option(url, "sublet_schema")
    if schema is not None and not re.fullmatch(r"[a-z_][a-z0-9_]{0,62}", schema):
        raise BadInput(f"sublet_schema {schema[:40]!r} is not a schema name: use a-z, 0-9 and _")
    return url, "sublet" if schema is None else schema


def split_connections(url: str) -> tuple[str, int]:
    """The server's URL and how many connections a process may open, from `?sublet_connections=N`."""
    url, text = _split_option(url, "sublet_connections")
    if text is None:
        return url, CONNECTIONS
    if not re.fullmatch(r"[0-9]{1,4}", text) or int(text) < 2:
        raise BadInput(f"sublet_connections {text[:40]!r} is not a number of connections: use 2 to 9999")
    return url, int(text)


def connection_options(url: str) -> dict[str, object]:
    """Options a connection needs and the address does not set."""
    try:
        said: dict[str, object] = dict(psycopg.conninfo.conninfo_to_dict(url))
    except psycopg.ProgrammingError:
        return {}  # connecting says what is wrong with it
    wanted: dict[str, object] = {k: v for k, v in SILENCE.items() if k not in said}
    if "," in str(said.get("host", "")) and "target_session_attrs" not in said:
        wanted["target_session_attrs"] = "read-write"
    return wanted
