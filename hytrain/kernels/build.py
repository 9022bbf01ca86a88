"""Builds a C++ source into a shared library at first use, and finds it in the cache later.

The file's name has a hash of everything that determines its contents (source, compiler, flags, the CPU behind
-march=native), so it is never stale. There is no lock: each process builds its own file and renames it, and replaces
at most an equal library.

    build(source)  ->  <cache>/hytrain/<stem>-<key>.so
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from hytrain.errors import BackendUnavailable

# No fast-math, no contraction: the order and rounding of all operations are part of the contract.
FLAGS = (
    *("-std=c++17", "-O3", "-march=native", "-fopenmp", "-fPIC", "-shared"),
    *("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
)


def build(source: Path, environ: Mapping[str, str] = os.environ) -> Path:
    """The library built from `source` for this machine, or its copy in the cache.

    `environ` names the cache (HYTRAIN_CACHE, else hytrain/ in XDG_CACHE_HOME or ~/.cache) and the compiler (CXX).
    Raises BackendUnavailable if there is no compiler, or if it fails.
    """
    compiler = find_compiler(environ)
    library = cache_folder(environ) / f"{source.stem}-{_key(source, compiler)}.so"
    if not library.exists():
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
    caches = environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(environ.get("HYTRAIN_CACHE") or Path(caches) / "hytrain")


def _key(source: Path, compiler: tuple[str, ...]) -> str:
    version = subprocess.run([*compiler, "--version"], capture_output=True, check=False).stdout
    parts = (source.read_bytes(), " ".join(compiler).encode(), version, " ".join(FLAGS).encode(), _cpu())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _cpu() -> bytes:
    """The CPU's model and features, which -march=native depends on: different machines may share a home folder."""
    wanted = ("model name", "flags", "Features", "CPU part")
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}) or [platform.processor()]).encode()


def _compile(compiler: tuple[str, ...], source: Path, library: Path) -> None:
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=library.parent, prefix=f"{library.stem}.", suffix=".tmp")
    except OSError as error:
        raise BackendUnavailable(
            f"cannot write to the cache {library.parent} ({error.strerror}): set HYTRAIN_CACHE to a folder of yours"
        ) from error
    os.close(descriptor)
    try:
        command = [*compiler, *FLAGS, str(source), "-o", temporary]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            raise BackendUnavailable(
                f"{' '.join(compiler)} could not build {source.name}: repair it, or choose backend='torch'. "
                f"It said:\n{result.stderr.strip()[-1000:]}"
            )
        os.replace(temporary, library)
    finally:
        Path(temporary).unlink(missing_ok=True)
