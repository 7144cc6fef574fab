"""The HTTP edge: connections, limits, authentication, logs, errors, and the relay to the session host."""
