"""`sublet run`: a command under a lease, its restarts, and drills."""
