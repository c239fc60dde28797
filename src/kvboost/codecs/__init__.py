"""K/V tensors <-> the bytes that tiers carry."""
