"""Decisions that learn from what happened: what pays, and what is good enough. No tensors."""
