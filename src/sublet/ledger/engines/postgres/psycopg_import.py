"""psycopg, or the sentence that says how to get it."""

from __future__ import annotations

from sublet.core.errors import MissingExtra

try:
    import psycopg
    from psycopg import errors as pg
except ImportError as missing:
    raise MissingExtra(
        "a PostgreSQL ledger needs the driver that is installed with the extra 'postgres'",
        remedy="pip install 'sublet[postgres]'",
    ) from missing

__all__ = ["pg", "psycopg"]
