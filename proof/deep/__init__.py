"""The deep simulation: one process, one thread, one seed; the real ledger and store under a virtual clock, and every kind of loss."""
