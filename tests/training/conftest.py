"""Homes as in `tests/runtime`: a ledger, a store and a warden of its own for each test."""

from tests.runtime.conftest import engine, home, ledger_url, sqlite_home

__all__ = ["engine", "home", "ledger_url", "sqlite_home"]
