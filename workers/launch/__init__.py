"""Starts and supervises the processes of a run: the command `hytrain-cluster`."""
