"""Bias and GELU in one kernel, in the MLPs of GPT-2-like models, and how much faster that is."""
