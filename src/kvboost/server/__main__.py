"""`python -m kvboost.server` and `kvboost-server`."""

import sys

HINT = "the server needs `pip install 'kvboost[server]'`"


def main() -> int:
    """Serve, if what that needs is installed; returns the exit code."""
    try:
        from kvboost.server.serve import main as serve  # noqa: PLC0415  (an extra)
    except ModuleNotFoundError as error:
        sys.stderr.write(f"kvboost-server: {HINT} ({error.name} is missing)\n")
        return 1
    return serve()


if __name__ == "__main__":
    sys.exit(main())
