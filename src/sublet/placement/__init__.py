"""Leased workers on other machines. Loaded by entry point, when SUBLET_PLACEMENT asks for it."""
