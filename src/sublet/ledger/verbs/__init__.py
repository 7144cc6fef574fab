"""The verbs of the ledger by subject; each is one transaction."""
