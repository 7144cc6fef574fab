"""Runs of commands: draining, requeueing, exit codes, drills, what a remote command sees."""
