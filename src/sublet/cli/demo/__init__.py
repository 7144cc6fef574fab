"""`sublet demo`."""
