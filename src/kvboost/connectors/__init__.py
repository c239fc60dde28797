"""KVBoost inside engines of others."""
