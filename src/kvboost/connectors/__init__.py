"""KVBoost inside other engines."""
