"""The lease itself: its states, renewal, gangs, hosts, block leases, tenants and the policy."""
