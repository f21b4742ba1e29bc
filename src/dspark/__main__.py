"""`python -m dspark` is the command `dspark`, for scripts and `torchrun`."""

import sys

from dspark.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
