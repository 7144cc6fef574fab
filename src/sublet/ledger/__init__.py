"""The ledger: engines for two databases, and verbs written once for both."""
