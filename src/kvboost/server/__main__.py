"""`python -m kvboost.server` and `kvboost-server`."""

import sys

from kvboost.errors import missing_extra

HINT = missing_extra("the server", "server")


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
