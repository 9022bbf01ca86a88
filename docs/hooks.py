"""Hooks of mkdocs: words show the glossary's meaning under the pointer, and tests that pages name are links."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

TESTS = "https://github.com/hytrain/hytrain/blob/main/tests/"
WORD = re.compile(r"^\| \*\*(.+?)\*\* \| (.+?) \|$", re.MULTILINE)
MARKUP = re.compile(r"\[([^]]*)\]\([^)]*\)|`")
TEST = re.compile(r"`(tests/)?([\w/]+\.py)::(\w+)`")


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """The page with its links, and the abbreviations that Python-Markdown's extension `abbr` reads."""
    markdown = TEST.sub(_link, markdown)
    if page.file.src_uri == "glossary.md":
        return markdown
    glossary = (Path(config["docs_dir"]) / "glossary.md").read_text(encoding="utf-8")
    found = ((words.split(", "), MARKUP.sub(r"\1", meaning)) for words, meaning in WORD.findall(glossary))
    return "\n".join([markdown, "", *(f"*[{word}]: {meaning}" for words, meaning in found for word in words)])


def _link(test: re.Match[str]) -> str:
    """A file without a folder is an integration test."""
    folder, file, name = test.groups()
    path = file if folder or "/" in file else f"integration/{file}"
    return f'[test]({TESTS}{path} "{file}::{name}")'
