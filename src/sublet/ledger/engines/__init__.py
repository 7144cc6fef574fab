"""The databases that carry the verbs."""
