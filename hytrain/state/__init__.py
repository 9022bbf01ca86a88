"""Saves and loads: the optimizer's state as a dict and as a folder, and what makes a folder whole."""
