"""`sublet checkpoint …`."""
