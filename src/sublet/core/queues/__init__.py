"""Items of queues, and the audit that each was done once."""
