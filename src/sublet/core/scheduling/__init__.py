"""Who gets which slice of the pool, who waits, and whose lease is taken: admission, preemption, the tick."""
