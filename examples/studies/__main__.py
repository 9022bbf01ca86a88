"""All tables of the studies, one after the other: python -m examples.studies [--small]."""

from __future__ import annotations

from examples.studies import cotraining, decoder, digits

if __name__ == "__main__":
    digits.main()
    print()
    decoder.main()
    print()
    cotraining.main()
