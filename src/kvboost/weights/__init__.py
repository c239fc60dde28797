"""Weights that do not fit the memory: brought in as a forward needs them, within a budget."""
