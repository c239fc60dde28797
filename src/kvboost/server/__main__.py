"""`python -m kvboost.server` and `kvboost-server`."""

import sys

from kvboost.config import choose_wait_policy
from kvboost.errors import missing_packages

PACKAGES = "fastapi httptools jinja2 'llguidance<2' prometheus-client pydantic uvicorn"
HINT = missing_packages("the server", PACKAGES)


def main() -> int:
    """Serve, if the packages for it are installed; returns the exit code."""
    choose_wait_policy()
    try:
        from kvboost.server.serve import main as serve  # noqa: PLC0415  (an extra)
    except ModuleNotFoundError as error:
        sys.stderr.write(f"kvboost-server: {HINT} ({error.name} is missing)\n")
        return 1
    return serve()


if __name__ == "__main__":
    sys.exit(main())
