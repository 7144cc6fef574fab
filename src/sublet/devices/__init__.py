"""GPUs: drivers, their sessions, scrubbing and the self-test."""
