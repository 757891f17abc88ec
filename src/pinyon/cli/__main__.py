"""``python -m pinyon.cli`` is the ``pinyon`` command."""

import sys

from pinyon.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
