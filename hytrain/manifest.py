"""Checksums of a folder's files, so that a damaged folder, or a mixture of two, is refused before it is used.

    seal(folder, files)    sync every file to disk, then write SHA256SUMS in one rename
    verify(folder)         compare every file with it

On several ranks, each one reads and hashes its own part of the files, and rank 0 writes the sums of all.

`SHA256SUMS` is what the program sha256sum writes, and checks with `sha256sum -c SHA256SUMS`. SHA-256 runs at 1.5 GB/s
per thread on a CPU with instructions for it (CRC-32: 2.5). While somebody waits, several files are read at once, so
that the disk is the slower part. A file is read back right after it was written, while it is still in memory. `saving`
and `recipe.checkpoint` call this.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from traceback import clear_frames
from typing import Final

from hytrain.errors import ConfigError, SavingError
from hytrain.run.ranks import Ranks

ONE: Final = Ranks()
SUMS: Final = "SHA256SUMS"
#: Accepts the files of a folder as they are.
ACCEPT: Final = f"find . -type f ! -name {SUMS} -exec sha256sum {{}} + > {SUMS}"
#: What the threads of this process are writing, and since when.
_being_written: dict[object, tuple[Path, float]] = {}


@contextmanager
def writing(folder: Path, *errors: type[Exception]) -> Iterator[None]:
    """Raise `SavingError` where a file of `folder` cannot be written: for OSError, and for other `errors`."""
    key = object()
    _being_written[key] = folder, time.monotonic()
    try:
        yield
    except SavingError:
        raise
    except Exception as error:
        if not isinstance(error, (OSError, *errors)):
            raise
        clear_frames(error.__traceback__)  # or whoever holds the new error holds what was to be written
        said = getattr(error, "strerror", None) or error
        raise SavingError(f"{folder} could not be written: {said}. What was saved before is whole") from None
    finally:
        del _being_written[key]


def being_written() -> tuple[Path, float] | None:
    """Which folder this process is writing, on any thread, and for how many seconds: of several the first."""
    folder, began_s = min([*_being_written.values()], key=lambda known: known[1], default=(None, 0.0))
    return None if folder is None else (folder, time.monotonic() - began_s)


def seal(folder: Path, files: Iterable[Path], ranks: Ranks = ONE, *, in_parallel: bool = False) -> None:
    """Write the checksums of all ranks' `files`, which are in `folder` or below it.

    Until this returns, an earlier `SHA256SUMS` is in force. Behind a training, or while the interpreter ends, there are
    no cores or threads to take: then files are read one after the other.
    """
    with ranks.together(), writing(folder):
        paths = list(files)
        if in_parallel:
            with ThreadPoolExecutor() as pool:
                sums = list(pool.map(_settle, paths))
        else:
            sums = [_settle(path) for path in paths]
        for parent in {path.parent for path in paths}:
            sync(parent)
        own = "".join(f"{found}  {path.relative_to(folder)}\n" for path, found in zip(paths, sums, strict=True))
    lines = "".join(ranks.gather(own))
    with ranks.together(), writing(folder):
        if ranks.rank == 0:
            replace(folder / SUMS, lines)


def verify(folder: Path, ranks: Ranks = ONE) -> list[Path]:
    """The sealed files of `folder`.

    Raises `ConfigError`, which names the file, unless they are the bytes that were sealed and no other file is beside
    them. Hidden files do not count.
    """
    with ranks.together():
        sums = _read(folder)
        for path in sums:
            if not path.is_file():
                raise ConfigError(
                    f"{folder} is not whole: {path.relative_to(folder)} is missing; load another checkpoint"
                )
        for parent in {path.parent for path in sums}:
            for path in parent.iterdir():
                if path.is_file() and path not in sums and path.name != SUMS and not path.name.startswith("."):
                    raise ConfigError(f"{path} was not saved with the other files of {folder}: move it elsewhere")
        own = list(sums)[ranks.rank :: ranks.world]
        with ThreadPoolExecutor() as pool:
            for path, found in zip(own, pool.map(_digest, own), strict=True):
                if found != sums[path]:
                    raise ConfigError(
                        f"{path} is damaged, or of another checkpoint: its checksum is not that in {SUMS}"
                    )
    return list(sums)


def files_in(folder: Path) -> Iterator[Path]:
    """The files in `folder` and below, to be sealed. For a folder below that is sealed by itself, its `SHA256SUMS`."""
    for path in sorted(folder.iterdir()):
        if not path.is_dir():
            if path.name != SUMS:
                yield path
        elif (path / SUMS).is_file():
            yield path / SUMS
        else:
            yield from files_in(path)


def replace(file: Path, text: str) -> None:
    """Write a small file in one rename: whenever the process is killed, the old text is there or the new one."""
    partial = file.with_name(f".{file.name}.partial")
    with partial.open("w") as opened:
        opened.write(text)
        opened.flush()
        os.fsync(opened.fileno())
    os.replace(partial, file)
    sync(file.parent)


def sync(folder: Path) -> None:
    """Bring a folder's list of files to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _settle(path: Path) -> str:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}; load another checkpoint") from None


def _read(folder: Path) -> dict[Path, str]:
    """The checksum of each sealed file."""
    try:
        text = (folder / SUMS).read_bytes().decode(errors="replace")
    except OSError as error:
        raise ConfigError(
            f"{folder} has no checksums: {SUMS}: {error.strerror}. It is not whole, or older than HyTrain's checksums; "
            f"in the latter case, accept it as it is with (cd {folder} && {ACCEPT})"
        ) from None
    sums = {}
    for line in text.removesuffix("\n").split("\n"):
        if (match := re.fullmatch(r"([0-9a-f]{64}) [ *](.+)", line)) is None:
            raise ConfigError(f"{folder / SUMS} is damaged; load another checkpoint")
        sums[folder / match[2]] = match[1]
    return sums
