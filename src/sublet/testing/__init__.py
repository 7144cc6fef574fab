"""A shipped kit for testing programs that lease: virtual clock, failpoints, throw-away PostgreSQL."""
