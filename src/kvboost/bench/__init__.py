"""How fast and how faithful: KVBoost beside other systems, on the same prompts."""
