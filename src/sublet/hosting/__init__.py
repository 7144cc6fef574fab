"""Processes of this host: who they are, how they end."""
