"""The transactional truth. `sqlite.py` and `postgres.py` are engines; the verbs between them are written once."""
