"""Upkeep of saved states: history, sweep, scrub, rebuild."""
