"""`python -m conadv`, which is what torchrun starts on every rank."""

import sys

from conadv.cli import main

if __name__ == "__main__":
    sys.exit(main())
