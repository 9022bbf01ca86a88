"""Both tables of the thesis, one after the other: python -m examples.studies [--small]."""

from __future__ import annotations

from examples.studies import decoder, digits

if __name__ == "__main__":
    digits.main()
    print()
    decoder.main()
