"""A training step on the trainer's side, from the first forward to the boundary."""
