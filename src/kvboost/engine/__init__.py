"""The engine: the stages put to work for one process."""
