"""Steps and effects: the commit rule, how often to save, which samples a batch has, kernel arguments."""
