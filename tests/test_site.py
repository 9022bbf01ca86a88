"""The website that `make docs` builds, as a browser shows it from its folder."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from test_report import in_a_browser

ROOT = Path(__file__).resolve().parent.parent
EACH = ("AdamW", "Adam", "SGD", "Lion", "Muon")
TESTS = "https://github.com/hytrain/hytrain/blob/main/tests/"


def test_the_search_works_from_the_folder(tmp_path: Path) -> None:
    """Without a server, and without a script from another site."""
    for package in ("material", "mkdocstrings"):
        pytest.importorskip(package)
    site = tmp_path / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(site)]
    subprocess.run(command, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, check=True)
    page = (site / "index.html").read_text()
    assert not re.findall(r'<(?:script|link|img)[^>]*(?:src|href)="https?:(?!//hytrain)', page)
    seen = in_a_browser(f"{(site / 'index.html').as_uri()}?q=gradient", tmp_path / "profile")
    assert re.search(r"\d+ matching documents", seen)
    assert re.search(r'<div class="md-search"[^>]* aria-label="Search"', seen), "site.js has run"
    api = (site / "api.html").read_text()
    of_each = [api.split(f'<h3 id="hytrain.optim.{name}"')[1].split("<h3 ")[0] for name in EACH]
    assert all(option in of_one for of_one in of_each for option in ("max_grad_norm", "grad_accumulation"))
    memory = (site / "memory.html").read_text()
    assert re.search(r'<abbr title="[^"]+">masters</abbr>', memory), "words of the glossary"
    assert f'{TESTS}integration/test_k_invariance.py" title=' in (site / "architecture.html").read_text()
