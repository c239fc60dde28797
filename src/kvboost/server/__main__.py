"""`python -m kvboost.server` and `kvboost-server`."""

import os
import sys

from kvboost.errors import missing_packages

PACKAGES = "fastapi httptools jinja2 'llguidance<2' prometheus-client pydantic uvicorn"
HINT = missing_packages("the server", PACKAGES)


def main() -> int:
    """Serve, if the packages for it are installed; returns the exit code."""
    # Before torch loads: threads that spin while they wait stall each other on a busy machine.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        from kvboost.server.serve import main as serve  # noqa: PLC0415  (an extra)
    except ModuleNotFoundError as error:
        sys.stderr.write(f"kvboost-server: {HINT} ({error.name} is missing)\n")
        return 1
    return serve()


if __name__ == "__main__":
    sys.exit(main())
