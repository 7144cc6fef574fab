"""The routes, by what they act on."""
