"""KVBoost as a part of tools that know nothing of it."""
