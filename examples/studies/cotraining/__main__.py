"""The study of co-training, or a recipe of one's own: python -m examples.studies.cotraining [--recipe FILE]."""

from __future__ import annotations

from examples.studies.cotraining.study import main

if __name__ == "__main__":
    main()
