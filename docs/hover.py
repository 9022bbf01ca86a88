"""A hook of mkdocs: pages show the glossary's meaning of a word when the pointer rests on it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

WORD = re.compile(r"^\| \*\*(.+?)\*\* \| (.+?) \|$", re.MULTILINE)
MARKUP = re.compile(r"\[([^]]*)\]\([^)]*\)|`")


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """The page, and the abbreviations that Python-Markdown's extension `abbr` reads."""
    glossary = (Path(config["docs_dir"]) / "glossary.md").read_text(encoding="utf-8")
    if page.file.src_uri == "glossary.md":
        return markdown
    found = ((words.split(", "), MARKUP.sub(r"\1", meaning)) for words, meaning in WORD.findall(glossary))
    return "\n".join([markdown, "", *(f"*[{word}]: {meaning}" for words, meaning in found for word in words)])
