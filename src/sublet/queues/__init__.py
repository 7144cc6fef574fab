"""`sublet.queue`: publishing, pulling, workers and results."""
