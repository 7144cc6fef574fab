"""The bucket client: requests that are retried and bounded in time."""
