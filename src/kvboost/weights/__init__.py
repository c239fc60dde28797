"""Weights larger than memory: streamed as a forward needs them, within a budget."""
