"""The whole state of a running program: its frames, its objects and its process, taken and put back."""
