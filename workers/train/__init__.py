"""The process that trains a recipe."""
