"""The command line. One module per noun; `main.py` loads only the one that is called."""
