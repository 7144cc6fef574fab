"""Devices: how they are found, and (with their sessions) how they are used."""
