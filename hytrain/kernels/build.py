"""Builds a C++ source into a shared library at first use, and finds it in the cache later.

The file's name has a hash of everything that determines its contents (source, compiler, flags, the CPU behind
-march=native), so it is never stale. There is no lock: each process builds its own file and renames it, and replaces
at most an equal library.

    build(source)  ->  <cache>/hytrain/<stem>-<key>.so       the library, then the SHA-256 of it

A library runs with all rights of its user. So a file that is damaged, or that another user or everybody can write, is
not loaded but built anew; a folder that they can write is not used. The linker ignores what follows the library in its
file.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Final

from hytrain.config import home
from hytrain.errors import BackendUnavailable

# No fast-math, no contraction: the order and rounding of all operations are part of the contract.
FLAGS = (
    *("-std=c++17", "-O3", "-march=native", "-fopenmp", "-fPIC", "-shared"),
    *("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
)

#: Owners of libraries that may be loaded, besides the user: the system's administrator.
ROOT: Final = 0

_log = logging.getLogger(__name__)


def build(source: Path, environ: Mapping[str, str] = os.environ, flags: tuple[str, ...] = ()) -> Path:
    """The library built from `source` for this machine, or its copy in the cache. `flags` are further ones.

    `environ` names the cache (HYTRAIN_CACHE, else hytrain/ in XDG_CACHE_HOME or ~/.cache) and the compiler (CXX).
    Raises BackendUnavailable if there is no compiler, or if it fails.
    """
    compiler = (*find_compiler(environ), *flags)
    library = _own_folder(cache_folder(environ)) / f"{source.stem}-{_key(source, compiler)}.so"
    if not _is_whole(library):
        _compile(compiler, source, library)
    return library


def find_compiler(environ: Mapping[str, str]) -> tuple[str, ...]:
    """The C++ compiler's command: CXX, or the first of the usual ones on the PATH."""
    asked = tuple(environ.get("CXX", "").split())
    path = environ.get("PATH")
    for command in (asked,) if asked else (("g++",), ("clang++",), ("c++",)):
        if shutil.which(command[0], path=path):
            return command
    what = f"CXX names {asked[0]!r}, which is not there" if asked else "there is no C++ compiler on the PATH"
    raise BackendUnavailable(f"{what}: install one (apt-get install g++), or choose backend='torch', which needs none")


def cache_folder(environ: Mapping[str, str]) -> Path:
    if own := environ.get("HYTRAIN_CACHE"):
        return Path(own)
    caches = environ.get("XDG_CACHE_HOME") or home() / ".cache"
    return Path(caches) / "hytrain"


def _key(source: Path, compiler: tuple[str, ...]) -> str:
    version = _version(compiler, os.environ.get("PATH"))
    parts = (source.read_bytes(), " ".join(compiler).encode(), version, " ".join(FLAGS).encode(), _cpu())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


@cache
def _version(compiler: tuple[str, ...], path: str | None) -> bytes:
    """What the compiler that is found on this path says of itself; asked once in a process."""
    return subprocess.run([*compiler, "--version"], capture_output=True, check=False).stdout


@cache
def _cpu() -> bytes:
    """The CPU's model and features, which -march=native depends on: different machines may share a home folder."""
    wanted = ("model name", "flags", "Features", "CPU part")
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}) or [platform.processor()]).encode()


def _own_folder(folder: Path) -> Path:
    """Make the cache, for its user alone. If it is there and others can write it, a folder in the temporary one."""
    whose = _make_folder(folder)
    if not whose:
        return folder
    own = Path(tempfile.gettempdir()) / f"hytrain-{os.getuid()}"
    _log.warning("the cache %s is writable by %s, so compiled kernels are in %s", folder, whose, own)
    if whose := _make_folder(own):
        raise BackendUnavailable(f"{own} is writable by {whose}, too: set HYTRAIN_CACHE to a folder of yours")
    return own


def _make_folder(folder: Path) -> str:
    """Make a folder, unless it is there. Returns who else can write it."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return _writers(folder.stat())
    except OSError as error:
        raise _no_cache(folder, error) from error


def _no_cache(folder: Path, error: OSError) -> BackendUnavailable:
    return BackendUnavailable(
        f"cannot write to the cache {folder} ({error.strerror}): set HYTRAIN_CACHE to a folder of yours"
    )


def _writers(info: os.stat_result) -> str:
    """Which other user can write a file or folder, or "everybody"; empty if neither. Groups are trusted."""
    if info.st_uid not in (os.getuid(), ROOT):
        return f"user {info.st_uid}"
    return "everybody" if info.st_mode & stat.S_IWOTH else ""


def _is_whole(library: Path) -> bool:
    """Whether the library is there, no other user can have written it, and its bytes are those that were built."""
    try:
        with library.open("rb") as file:
            whose, content = _writers(os.fstat(file.fileno())), file.read()
    except FileNotFoundError:
        return False
    except OSError as error:
        raise _no_cache(library.parent, error) from error
    size = hashlib.sha256().digest_size
    is_damaged = hashlib.sha256(content[:-size]).digest() != content[-size:]
    if whose or is_damaged:
        _log.warning("built anew: %s is %s", library, f"writable by {whose}" if whose else "damaged")
    return not (whose or is_damaged)


def _compile(compiler: tuple[str, ...], source: Path, library: Path) -> None:
    try:
        descriptor, temporary = tempfile.mkstemp(dir=library.parent, prefix=f"{library.stem}.", suffix=".tmp")
    except OSError as error:
        raise _no_cache(library.parent, error) from error
    os.close(descriptor)
    try:
        command = [*compiler, *FLAGS, str(source), "-o", temporary]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            raise BackendUnavailable(
                f"{' '.join(compiler)} could not build {source.name}: repair it, or choose backend='torch'. "
                f"It said:\n{result.stderr.strip()[-1000:]}"
            )
        with open(temporary, "r+b") as file:
            file.write(hashlib.sha256(file.read()).digest())
            os.fchmod(file.fileno(), 0o700)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, library)
    finally:
        Path(temporary).unlink(missing_ok=True)
