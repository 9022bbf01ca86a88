"""Fuzzers of what crosses process boundaries: in one process (`python -m tests.fuzz`), and against a live run."""
