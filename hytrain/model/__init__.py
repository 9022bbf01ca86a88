"""A model as HyTrain sees it: layers, their parameters and lives, and the hooks on its modules."""
