"""Tests of the ledger. A package, so that its modules may be named like those of its sibling folders."""
