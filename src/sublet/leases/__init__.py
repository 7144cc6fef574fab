"""The holder's side of a lease: request, acquire, keep, gang, teardown, warden; block leases and durable
values."""
