"""Objects in buckets, for whoever keeps something there: checkpoints and results alike. One client, one proof, one rule about forks."""
