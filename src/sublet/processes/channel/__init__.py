"""How values travel between two processes: messages, shared memory, pickles."""
