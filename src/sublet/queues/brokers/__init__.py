"""External brokers that items may come from."""
