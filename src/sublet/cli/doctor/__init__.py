"""`sublet doctor`."""
