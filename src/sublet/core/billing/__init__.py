"""What GPU time costs, where it went, and how much of it a tenant may have."""
