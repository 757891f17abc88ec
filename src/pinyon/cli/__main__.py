"""The ``pinyon`` command, for ``python -m pinyon.cli``."""

import sys

from pinyon.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
