"""Which replica should answer a request: the one that holds most of its text and is not busy.

Knows texts, names and numbers only: no engine, no network, no model.
"""
