"""Benchmarks: speed as ratios within one run, each system in a process of its own."""
