"""Scripts that know nothing of sublet: finding their training loop, and making it resumable."""
