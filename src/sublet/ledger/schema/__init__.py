"""The schema of each engine, and how an older one is brought up to date."""
