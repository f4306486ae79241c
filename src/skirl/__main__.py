"""``python -m skirl``."""

import sys

from skirl.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
