"""The shared engine: PostgreSQL."""
