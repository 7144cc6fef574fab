"""`sublet sim …`."""
