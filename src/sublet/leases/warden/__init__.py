"""The loop on each host that enforces leases, and the teardown it proves."""
