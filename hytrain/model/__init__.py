"""How HyTrain represents a model: its layers, their parameters and states, and the hooks on its modules."""
