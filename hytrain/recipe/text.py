"""Reads text from plain or compressed files and folders, and splits it into a training and a validation part.

The trainer calls `read` and `split`. Both work on bytes, so nothing is lost before the tokenizer.
"""

from __future__ import annotations

import gzip
import lzma
import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from hytrain.errors import ConfigError

DOCUMENT_GAP = b"\n\n"
COMPRESSED = frozenset({".xz", ".gz"})
TEXT_SUFFIXES = frozenset({".txt", ".text", ".md"})
TABLE_SUFFIXES = frozenset({".jsonl", ".parquet"})


def read(paths: Sequence[Path]) -> bytes:
    """The text of all files, in the order of the paths and, in a folder, of the names, with blank lines in between.

    Raises ConfigError if a path is missing or unreadable, or if there is no text.
    """
    return joined((content(file) for path in paths for file in _texts(path)), paths)


def joined(documents: Iterable[bytes], paths: Sequence[Path]) -> bytes:
    """The documents with blank lines in between. Raises ConfigError, with the paths, if there is no text."""
    stripped = (document.strip(b"\n") for document in documents)
    text = DOCUMENT_GAP.join(document for document in stripped if document)
    if not text.strip():
        raise ConfigError(f"There is no text in {', '.join(map(str, paths))}; name files that are not empty.")
    return text


def split(text: bytes, validation: float) -> tuple[bytes, bytes]:
    """What trains, and the last fraction `validation`, which begins at the next end of a document if one is near."""
    cut = round(len(text) * (1 - validation))
    near = cut + (len(text) - cut) // 2
    gap = text.find(DOCUMENT_GAP, cut, near)
    if gap >= 0:
        return text[:gap], text[gap:].lstrip(b"\n")
    while cut < len(text) and text[cut] & 0xC0 == 0x80:  # inside a UTF-8 character
        cut += 1
    return text[:cut], text[cut:]


def suffix(file: Path) -> str:
    """What the name of a file ends in, in lower case and without the compression's part: `.jsonl` of `a.jsonl.xz`."""
    last = file.suffix.lower()
    return Path(file.stem).suffix.lower() if last in COMPRESSED else last


def _is_text(file: Path) -> bool:
    return suffix(file) in TEXT_SUFFIXES or (suffix(file) == "" and file.suffix.lower() in COMPRESSED)


def files(path: Path, is_wanted: Callable[[Path], bool], wrong: str, empty: str) -> list[Path]:
    """A file, or those of a folder in the order of their names.

    Raises ConfigError if there is none; `wrong` and `empty` end the sentences about a file and about a folder.
    """
    if not path.exists():
        raise ConfigError(f"The data file {path} does not exist; correct data.paths.")
    if path.is_file() and not is_wanted(path):
        raise ConfigError(f"The data file {path} {wrong}")
    found = [path] if path.is_file() else [p for p in sorted(path.rglob("*")) if is_wanted(p) and p.is_file()]
    if not found:
        raise ConfigError(f"The data folder {path} {empty}")
    return found


def _texts(path: Path) -> list[Path]:
    kinds = ", ".join(sorted(TEXT_SUFFIXES | COMPRESSED))
    wrong = f"is not read as text, because its name does not end in {kinds}."
    if suffix(path) in TABLE_SUFFIXES:
        wrong = (
            "has rows and is not plain text; set data.kind: chat for conversations or for prompts and completions, or "
            "name the column that holds the text as data.text_column."
        )
    empty = f"holds no text file (one that ends in {kinds}); files with rows need data.kind: chat or data.text_column."
    return files(path, _is_text, wrong, empty)


def content(file: Path) -> bytes:
    """A file's bytes, decompressed if its name says so. Raises ConfigError if it can't be read."""
    try:
        raw = file.read_bytes()
        if file.suffix.lower() == ".xz":
            return lzma.decompress(raw)
        return gzip.decompress(raw) if file.suffix.lower() == ".gz" else raw
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        raise ConfigError(f"The data file {file} can't be read: {error}.") from None
