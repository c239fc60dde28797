"""Questions about ours alone: each is asked beside bare Transformers in one process."""
