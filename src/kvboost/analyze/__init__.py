"""What reuse would save, estimated from a log of requests: no model, no GPU, no text leaves."""
