"""The report of a benchmark run: one HTML page and the same in Markdown."""
