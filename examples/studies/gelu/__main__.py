"""The microbenchmark: python -m examples.studies.gelu [--detailed] [--export-csv FILE]."""

from __future__ import annotations

import sys

from examples.studies.gelu.microbenchmark import main

if __name__ == "__main__":
    sys.exit(main())
