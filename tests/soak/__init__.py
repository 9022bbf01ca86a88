"""A soak test: a recipe trains to its end while faults are injected; the last checkpoint has the undisturbed bits."""
