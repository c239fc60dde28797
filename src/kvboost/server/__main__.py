"""`python -m kvboost.server`."""

import sys

from kvboost.server.serve import main

if __name__ == "__main__":
    sys.exit(main())
