"""`python -m ghostlayers`, and `torchrun -m ghostlayers`: the command line."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
