"""Strategies that choose which reused tokens are computed again."""
