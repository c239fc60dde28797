"""The `kvboost` command."""
