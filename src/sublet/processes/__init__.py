"""Processes of this host: leased workers, their supervisors, their sandbox, and the channel to them."""
