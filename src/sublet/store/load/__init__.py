"""Loading: verified reads into memory or into what the caller has."""
