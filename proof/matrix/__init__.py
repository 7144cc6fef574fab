"""The matrix: programs built as published training scripts, disturbed under the shim and compared with plain Python."""
