"""Where chunks lie. Tiers carry bytes under keys and know nothing of tensors or models."""
