"""Tiers: storage of chunks as bytes under keys, without tensors or models."""
