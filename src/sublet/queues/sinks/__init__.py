"""Where results go beside the ledger."""
