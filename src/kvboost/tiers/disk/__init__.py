"""Local disk: frames in pre-allocated segment files, and a log of where each one lies."""
