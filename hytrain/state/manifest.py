"""Checksums of a folder's files, so that a damaged folder, or a mixture of two, is refused before it is used.

    seal(folder, files)    sync every file to disk, then write SHA256SUMS in one rename
    verified(folder)       compare every file with it, and keep them from being removed (`folders.locked`)

On several ranks, each one reads and hashes its own part of the files, and rank 0 writes the sums of all, and locks.

`SHA256SUMS` is what the program sha256sum writes, and checks with `sha256sum -c SHA256SUMS`. SHA-256 runs at 1.5 GB/s
per thread on a CPU with instructions for it (CRC-32: 2.5). While somebody waits, several files are read at once, so
that the disk is the slower part. A file is read back right after it was written, while it is still in memory.
`folders` and `recipe.checkpoint` call this.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path, PurePosixPath
from traceback import clear_frames
from typing import Final

from hytrain.errors import ConfigError, SavingError
from hytrain.run.ranks import Ranks
from hytrain.state.locks import locked, opened, read, said
from hytrain.state.saver import each

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
        raise SavingError(f"{folder} could not be written: {said(error)}. What was saved before is whole") from None
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
        sums = each(_settle, paths, in_parallel=in_parallel)
        for parent in {path.parent for path in paths}:
            sync(parent)
        own = "".join(f"{found}  {path.relative_to(folder)}\n" for path, found in zip(paths, sums, strict=True))
    lines = "".join(ranks.gather(own))
    with ranks.together(), writing(folder):
        if ranks.rank == 0:
            replace(folder / SUMS, lines)


def verify(folder: Path) -> None:
    """What `verified` does, for those who don't read the files right afterwards."""
    with verified(folder):
        pass


@contextmanager
def verified(folder: Path, ranks: Ranks = ONE) -> Iterator[list[Path]]:
    """The sealed files of `folder`, which are locked meanwhile: those of one seal, whoever seals others there.

    Raises `ConfigError`, which names the file, unless they are the bytes that were sealed and nothing else is beside
    them. Hidden files and folders do not count.
    """
    with ExitStack() as held:
        with ranks.together():
            text = _hold(folder, held) if ranks.rank == 0 else _text(folder)
        sums = _parsed(folder, ranks.gather(text)[0])
        with ranks.together():
            _compare(folder, sums, ranks)
        yield list(sums)


def sealed(folder: Path) -> list[Path]:
    """The names of the sealed files, as they are at this moment. Raises `ConfigError` if there are none."""
    return list(_parsed(folder, _text(folder)))


def _hold(folder: Path, held: ExitStack) -> str:
    """The checksums, once the folders of the files that they name are locked against those who would remove them."""
    while True:
        text = _text(folder)
        with ExitStack() as tried:
            for parent in sorted({path.parent for path in _parsed(folder, text)}):
                with suppress(OSError):  # it is not there: others have removed it, or its files are missing
                    tried.enter_context(locked(parent, shared=True))
            if _text(folder) == text:
                held.push(tried.pop_all())
                return text


def _compare(folder: Path, sums: dict[Path, str], ranks: Ranks) -> None:
    for path in sums:
        if not path.is_file():
            raise ConfigError(f"{folder} is not whole: {path.relative_to(folder)} is missing; load another checkpoint")
    for parent in {path.parent for path in sums}:
        for path in parent.iterdir():
            if not path.is_dir() and path not in sums and path.name != SUMS and not path.name.startswith("."):
                raise ConfigError(f"{path} was not saved with the other files of {folder}: move it elsewhere")
    own = list(sums)[ranks.rank :: ranks.world]
    for path, found in zip(own, each(_digest, own), strict=True):
        if found != sums[path]:
            raise ConfigError(f"{path} is damaged, or of another checkpoint: its checksum is not that in {SUMS}")


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
    with locked(file.parent):  # others may replace it, too
        partial.unlink(missing_ok=True)  # whatever it is: a killed process's, or a pipe, where writing would wait
        with partial.open("x") as opened:
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
    with opened(path) as file:
        os.fsync(file.fileno())
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest(path: Path) -> str:
    try:
        with opened(path) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}; load another checkpoint") from None


def _text(folder: Path) -> str:
    """The checksums as they are written."""
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {folder}")
    try:
        return read(folder / SUMS).decode(errors="replace")
    except OSError as error:
        raise ConfigError(
            f"{folder} has no checksums: {SUMS}: {error.strerror}. It is not whole, or older than HyTrain's checksums; "
            f"in the latter case, accept it as it is with (cd {folder} && {ACCEPT})"
        ) from None


def _parsed(folder: Path, text: str) -> dict[Path, str]:
    """The checksum of each sealed file. All are in `folder` or below."""
    sums = {}
    for line in text.removesuffix("\n").split("\n"):
        match = re.fullmatch(r"([0-9a-f]{64}) [ *](.+)", line)
        if match is None or (name := PurePosixPath(match[2])).is_absolute() or ".." in name.parts:
            raise ConfigError(f"{folder / SUMS} is damaged; load another checkpoint")
        sums[folder / name] = match[1]
    return sums
