"""Finds the library of a C++ source for this machine: in the package, or in the cache, where first use builds it.

A wheel has libraries for several kinds of CPU (`VARIANTS`), which setup.py builds. Where none fits, and in a checkout,
the source is compiled for the CPU at hand. All have the same functions with the same results, bit for bit.

    opened(source)  ->  <package>/<stem>-avx512-<key>.so, the first that this CPU can run and the system can load
                    ->  build(source)

The file's name in the cache has a hash of everything that determines its contents (source, compiler, flags, the CPU
behind -march=native), so it is never stale. There is no lock: each process builds its own file and renames it, and
replaces at most an equal library.

    build(source)  ->  <cache>/hytrain/<stem>-<key>.so       the library, then the SHA-256 of it

A library runs with all rights of its user. So a file that is damaged, or that another user or everybody can write, is
not loaded but built anew; a folder that they can write is not used. The linker ignores what follows the library in its
file.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from hytrain.errors import BackendUnavailable

# No fast-math, no contraction: the order and rounding of all operations are part of the contract.
FLAGS = (
    *("-std=c++17", "-O3", "-fopenmp", "-fPIC", "-shared"),
    *("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
)
#: For the CPU that compiles.
NATIVE: Final = ("-march=native",)

_AVX2: Final = ("avx2", "fma", "f16c")
#: What a wheel has libraries for, by machine, the fastest first: a name, the architecture that compilers begin with,
#: and the features that are added, which compilers and /proc/cpuinfo call alike.
VARIANTS: Final[dict[str, dict[str, tuple[str, tuple[str, ...]]]]] = {
    "x86_64": {
        "avx512": ("x86-64", (*_AVX2, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")),
        "avx2": ("x86-64", _AVX2),
    },
    "aarch64": {"neon": ("armv8-a", ())},
}

#: Owners of libraries that may be loaded, besides the user: the system's administrator.
ROOT: Final = 0

_log = logging.getLogger(__name__)


def opened(source: Path, flags: tuple[str, ...] = (), variant: str | None = None) -> ctypes.CDLL:
    """The library of a source, for this CPU. With `flags`, further ones, the package's is only the one of `variant`.

    Raises BackendUnavailable where the package has none that fits, and none can be built.
    """
    named = [] if variant is None else [source.with_name(package_name(source, variant))]
    for library in filter(Path.exists, named) if flags else packaged(source):
        with suppress(OSError):  # built for a newer system
            return _load(library)
    built = build(source, flags=(*NATIVE, *flags))
    try:
        return _load(built)
    except OSError as error:  # a folder whose files may not be executed, a compiler whose libraries are not torch's
        raise BackendUnavailable(f"what was compiled of {source.name} cannot be loaded: {error}") from error


def packaged(source: Path, machine: str = platform.machine()) -> list[Path]:
    """The libraries beside `source` that this CPU can run, the fastest first."""
    there = features()
    fitting = [name for name, (_, needed) in VARIANTS.get(machine, {}).items() if there.issuperset(needed)]
    return [library for name in fitting if (library := source.with_name(package_name(source, name))).exists()]


def package_name(source: Path, variant: str) -> str:
    """It has a hash of the source: a library that was built from another one is not found."""
    key = hashlib.sha256(b"\0".join((source.read_bytes(), " ".join(FLAGS).encode()))).hexdigest()[:16]
    return f"{source.stem}-{variant}-{key}.so"


def variant_flags(variant: str, machine: str = platform.machine()) -> tuple[str, ...]:
    architecture, needed = VARIANTS[machine][variant]
    return (f"-march={architecture}", *(f"-m{feature}" for feature in needed))


def _load(library: Path) -> ctypes.CDLL:
    """A machine without a compiler may not have OpenMP's library either. torch brings one of the same name."""
    _log.debug("loading %s", library)
    try:
        return ctypes.CDLL(str(library))
    except OSError:
        if (torch := find_spec("torch")) is None or torch.origin is None:
            raise
        ctypes.CDLL(str(Path(torch.origin).parent / "lib" / "libgomp.so.1"))
        return ctypes.CDLL(str(library))


def build(source: Path, environ: Mapping[str, str] = os.environ, flags: tuple[str, ...] = NATIVE) -> Path:
    """The library built from `source`, or its copy in the cache. `flags` are those beside FLAGS.

    `environ` names the cache (HYTRAIN_CACHE, else hytrain/ in XDG_CACHE_HOME or ~/.cache) and the compiler (CXX).
    Raises BackendUnavailable if there is no compiler, or if it fails.
    """
    compiler, flags = find_compiler(environ), (*FLAGS, *flags)
    library = _own_folder(cache_folder(environ)) / f"{source.stem}-{_key(source, compiler, flags)}.so"
    if not _is_whole(library):
        _compile(compiler, flags, source, library)
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
    from hytrain.config import home  # setup.py has no use for it, nor for what it imports

    caches = environ.get("XDG_CACHE_HOME") or home() / ".cache"
    return Path(caches) / "hytrain"


def _key(source: Path, compiler: tuple[str, ...], flags: tuple[str, ...]) -> str:
    version = _version(compiler, os.environ.get("PATH"))
    parts = (source.read_bytes(), " ".join(compiler).encode(), version, " ".join(flags).encode(), cpu())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


@cache
def _version(compiler: tuple[str, ...], path: str | None) -> bytes:
    """What the compiler that is found on this path says of itself; asked once in a process."""
    return subprocess.run([*compiler, "--version"], capture_output=True, check=False).stdout


@cache
def features() -> frozenset[str]:
    """What the CPU can do, as the system calls it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return frozenset(next((line.split() for line in lines if line.startswith(("flags", "Features"))), ()))


@cache
def cpu() -> bytes:
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


def _compile(compiler: tuple[str, ...], flags: tuple[str, ...], source: Path, library: Path) -> None:
    try:
        descriptor, temporary = tempfile.mkstemp(dir=library.parent, prefix=f"{library.stem}.", suffix=".tmp")
    except OSError as error:
        raise _no_cache(library.parent, error) from error
    os.close(descriptor)
    _log.warning("compiling %s for this CPU: only the first start on a machine waits for it", source.name)
    try:
        command = [*compiler, *flags, str(source), "-o", temporary]
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
