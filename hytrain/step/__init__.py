"""One training step in the trainer process, from the first forward to the step boundary."""
