"""Reads rows from JSON lines, Parquet files and folders that `datasets` has saved.

`task` reads the conversations, or one column of texts. JSON lines need no library; the others need `.[data]`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hytrain.errors import ConfigError
from hytrain.extras import needed
from hytrain.recipe.text import TABLE_SUFFIXES, content, files, suffix

Row = dict[str, Any]
SAVED, SAVED_SPLITS = "state.json", "dataset_dict.json"  # written by `Dataset.save_to_disk`, and by a DatasetDict's


def rows(paths: Sequence[Path]) -> Iterator[tuple[str, Row]]:
    """Each row with its place, such as `chat.jsonl, line 3`. The files of a folder are in the order of their names.

    Raises ConfigError if a file is missing or unreadable, or is not one of rows.
    """
    for path in paths:
        if (path / SAVED_SPLITS).is_file():
            splits = ", ".join(sorted(p.name for p in path.iterdir() if p.is_dir()))
            raise ConfigError(
                f"The data folder {path} holds the splits {splits}; name the folder of one in data.paths."
            )
        if (path / SAVED).is_file():
            yield from _saved(path)
        else:
            for file in _tables(path):
                yield from _parquet(file) if suffix(file) == ".parquet" else _json_lines(file)


def column(paths: Sequence[Path], name: str) -> Iterator[bytes]:
    """The texts of one column. Raises ConfigError if a row lacks it or has something else there."""
    for place, row in rows(paths):
        if not isinstance(row.get(name), str):
            found = "no such column" if name not in row else f"{type(row[name]).__name__} there"
            raise ConfigError(f'data.text_column is "{name}", but {place} has {found}; its columns: {", ".join(row)}.')
        yield row[name].encode()


def _tables(path: Path) -> list[Path]:
    kinds = " or ".join(sorted(TABLE_SUFFIXES))
    wrong = f"has no rows that can be read, because its name does not end in {kinds}."
    empty = f"holds no rows: no file that ends in {kinds}, no saved dataset."
    return files(path, lambda file: suffix(file) in TABLE_SUFFIXES, wrong, empty)


def _json_lines(file: Path) -> Iterator[tuple[str, Row]]:
    for number, line in enumerate(content(file).split(b"\n"), 1):
        if not line.strip():
            continue
        place = f"{file}, line {number},"
        try:
            written = line.decode("utf-8-sig")
            row = json.loads(written)
            if "\\ud" in written.lower():  # half of a pair of escapes is no character, and becomes a question mark
                row = json.loads(json.dumps(row, ensure_ascii=False).encode(errors="replace"))
        except UnicodeDecodeError as error:
            raise ConfigError(f"{place} is not UTF-8: {error}.") from None
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{place} is not valid JSON: {error}.") from None
        if not isinstance(row, dict):
            raise ConfigError(f"{place} is not a JSON object.")
        yield place, row


def _parquet(file: Path) -> Iterator[tuple[str, Row]]:
    with needed(str(file), "data"):
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    number = 0
    try:
        with ParquetFile(file) as table:
            for batch in table.iter_batches():
                for row in batch.to_pylist():
                    number += 1
                    yield f"{file}, row {number},", row
    except (OSError, ArrowException) as error:
        raise ConfigError(f"The data file {file} can't be read: {str(error).splitlines()[0]}") from None


def _saved(folder: Path) -> Iterator[tuple[str, Row]]:
    with needed(str(folder), "data"):
        from datasets import load_from_disk
    try:
        table = load_from_disk(str(folder))
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"The dataset in {folder} can't be read: {str(error).splitlines()[0]}") from None
    for number, row in enumerate(table, 1):
        yield f"{folder}, row {number},", dict(row)
