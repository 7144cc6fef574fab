"""`sublet run`, `logs`, `attach`, `cancel`, `drill`, `audit`."""
