"""What setup.cfg can't say: the README as the package index shows it, with links that lead to the repository."""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import setup

REPOSITORY = "https://github.com/hytrain/hytrain"
PICTURES = "https://raw.githubusercontent.com/hytrain/hytrain/main/"


def absolute(readme: str) -> str:
    """The page with each relative link of its Markdown, and each relative picture, made absolute."""
    readme = re.sub(r"(!\[[^]]*\]\()(?![a-z]+:)", rf"\1{PICTURES}", readme)
    readme = re.sub(r"(\]\()(?=#)", rf"\1{REPOSITORY}", readme)
    return re.sub(r"(\]\()(?![a-z]+:)", rf"\1{REPOSITORY}/blob/main/", readme)


setup(long_description=absolute((Path(__file__).parent / "README.md").read_text(encoding="utf-8")))
