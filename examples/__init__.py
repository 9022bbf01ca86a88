"""Recipes, scripts and studies; see docs/tree.md."""
