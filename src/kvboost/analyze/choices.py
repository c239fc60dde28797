"""Choices and defaults of the command; loads nothing, so that its help is quick."""

ROUTINGS = ("round-robin", "least-loaded", "two-choices", "prefix-hash", "reuse")
BYTES_PER_TOKEN = 4.0  # of English
