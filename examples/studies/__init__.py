"""Measurements that are no benchmarks of HyTrain; docs/studies.md has their tables."""
