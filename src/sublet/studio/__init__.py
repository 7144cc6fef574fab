"""The studio: many tenants, few GPUs, one fair service."""
