"""Five examples, each one idea; `python examples/run.py --list` shows them."""
