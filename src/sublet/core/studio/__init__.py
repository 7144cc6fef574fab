"""Studio sessions and tokens: their states, and what the session host must do."""
