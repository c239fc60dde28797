"""The host: everything that knows Transformers."""
