"""What reuse would save, told from a log of requests: no model, no GPU, no text leaves."""
