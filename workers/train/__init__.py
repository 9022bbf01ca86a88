"""The processes that train: the trainer of a recipe, and the CPU trainer beside it."""
