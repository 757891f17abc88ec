import sys

from tests.vopr.runner import main

if __name__ == "__main__":
    sys.exit(main())
