"""Transformers models: loading, certification, caches, attention and forward passes."""
