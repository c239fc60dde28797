"""Measurements: `python benchmarks/run.py NAME`."""
