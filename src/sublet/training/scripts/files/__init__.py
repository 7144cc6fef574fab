"""The parts of `file_history` and `open_files`."""
