"""The leased worker: the zygote it is forked from, what it runs, and the end of it in the calling process."""
