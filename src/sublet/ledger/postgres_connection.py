"""A connection to the ledger's server, with a short way for the verbs that are called for every lease, step and item.

Rules of this file:
- It is psycopg's connection and psycopg's adaptation of values, both ways. What a hot verb leaves out is the cursor and the generators it waits
  in, which cost the client three times what the rest does.
- A statement is prepared once on a connection. The server finds out its parameters' types: each is an argument of a function of ours, is compared
  with a column, or is cast. Where psycopg has dropped every prepared statement, as it does after a rollback, it is prepared again.
- Nothing of the library that waits is called: it waits without letting other threads run, and hears no interrupt.
- An interrupt (Ctrl-C) ends the wait at once. The connection is then in the middle of something, and whoever lent it drops it.
"""

from __future__ import annotations

import select
from collections.abc import Sequence
from typing import Any

from psycopg.adapt import PyFormat, Transformer

from sublet.ledger.postgres_driver import pg, psycopg
from sublet.ledger.tx import Row

_ANSWERED = frozenset([psycopg.pq.ExecStatus.TUPLES_OK, psycopg.pq.ExecStatus.COMMAND_OK])


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
        """The next, None after the last. It is there before it is asked for: the library would wait for it with everybody else in this process
        stopped."""
        server = self.pgconn
        while server.is_busy():
            self._hot_answers.poll()
            server.consume_input()
        return server.get_result()
