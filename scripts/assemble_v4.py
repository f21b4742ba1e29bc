"""One checkpoint out of a tower's and a drafter's, in the official layout of DeepSeek-V4.

    python scripts/assemble_v4.py runs/nano/model runs/nano-dspark/drafter OUT

OUT is a new directory. A checkpoint carries one drafter; others go into folders inside OUT, each a
drafter's directory of its own (`--drafter mtp1` finds OUT/mtp1).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from dspark.errors import DSparkError
from dspark.train.v4.checkpoint import assemble


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("model", "drafter", "out"):
        parser.add_argument(name, type=Path)
    given = parser.parse_args()
    try:
        assemble(given.model, given.drafter, given.out)
    except DSparkError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(given.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
