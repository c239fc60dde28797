"""KVBoost inside other tools."""
