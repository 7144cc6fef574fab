"""What the service shows: dashboard, live stream, metrics, prices, usage."""
