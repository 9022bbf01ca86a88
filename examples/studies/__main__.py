"""All tables of the studies, one after the other: python -m examples.studies [--small]."""

from __future__ import annotations

from examples.studies import decoder, digits
from examples.studies.cotraining import study

if __name__ == "__main__":
    digits.main()
    print()
    decoder.main()
    print()
    study.main()
