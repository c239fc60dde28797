"""What a user may choose. It loads nothing, so that the command's help is quick."""

ROUTINGS = ("round-robin", "least-loaded", "two-choices", "prefix-hash", "reuse")
BYTES_PER_TOKEN = 4.0  # of English
