"""SVG drawings of the report, the docs and `kvboost analyze`."""
