"""`python -m kvboost`."""

import sys

from kvboost.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
