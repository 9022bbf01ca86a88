"""Which backend is chosen, and where the native one's library is from: the package, or the cache, where it is built."""

from __future__ import annotations

import ctypes
import os
import subprocess
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import pytest
import torch

from hytrain.errors import BackendUnavailable
from hytrain.kernels import build as builder
from hytrain.kernels.backend import DTYPES
from hytrain.kernels.build import build, cache_folder, find_compiler, opened, package_name, packaged
from hytrain.kernels.choice import load
from hytrain.kernels.native import SOURCE, NativeBackend

TINY = 'extern "C" int answer() { return 42; }\n'


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.cpp"
    path.write_text(TINY)
    return path


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {"PATH": os.environ["PATH"], "HYTRAIN_CACHE": str(tmp_path / "cache")}


def answer(library: Path) -> int:
    return int(ctypes.CDLL(str(library)).answer())


def test_build_is_found_again(source: Path, environ: dict[str, str], caplog: pytest.LogCaptureFixture) -> None:
    """And only who waits for the compiler is told so, also where nobody has asked for logs."""
    library = build(source, environ)
    assert answer(library) == 42
    assert [record.levelname for record in caplog.records if "compiling tiny.cpp" in record.message] == ["WARNING"]
    built = library.stat()
    assert build(source, environ) == library
    assert (library.stat().st_ino, library.stat().st_mtime_ns) == (built.st_ino, built.st_mtime_ns)
    assert list(library.parent.iterdir()) == [library]  # no temporary file stays
    assert len(caplog.records) == 1


@pytest.mark.parametrize("change", ["source", "flags", "cpu", "compiler"])
def test_cache_is_keyed(
    change: str, source: Path, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    library = build(source, environ)
    if change == "source":
        source.write_text(TINY.replace("42", "43"))
    elif change == "flags":
        monkeypatch.setattr(builder, "FLAGS", (*builder.FLAGS, "-g"))
    elif change == "cpu":
        monkeypatch.setattr(builder, "cpu", lambda: b"another")
    else:
        wrapper = tmp_path / "another-c++"
        [command] = find_compiler(environ)
        wrapper.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo 99.0 && exit\nexec {command} "$@"\n')
        wrapper.chmod(0o755)
        environ["CXX"] = str(wrapper)
    other = build(source, environ)
    assert other != library and other.exists() and library.exists()


def test_late_builders_replace_a_library_in_use(
    source: Path, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    library = build(source, environ)
    loaded = ctypes.CDLL(str(library))
    monkeypatch.setattr(builder, "_is_whole", lambda library: False)  # as it looked to builders that began earlier
    with ThreadPoolExecutor(3) as pool:
        assert set(pool.map(lambda _: build(source, environ), range(3))) == {library}
    assert loaded.answer() == answer(library) == 42
    assert list(library.parent.iterdir()) == [library]


@pytest.fixture
def in_package(source: Path, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """The package's libraries by variant. They say which one they are: "built" says 42, and has no other answer."""
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(
        builder, "VARIANTS", {"here": {"newest": ("", ("a", "b")), "newer": ("", ("a",)), "any": ("", ())}}
    )
    monkeypatch.setattr(packaged, "__defaults__", ("here",))
    there = {}
    for value, variant in enumerate(("newest", "newer", "any")):
        own = source.with_name("own.cpp")
        own.write_text(TINY.replace("42", str(value)))
        there[variant] = build(own).rename(source.with_name(package_name(source, variant)))
    return there


@pytest.mark.parametrize(
    ("features", "found"), [("a b c", 0), ("a c", 1), ("c", 2)], ids=["all features", "some of them", "none"]
)
def test_the_package_has_a_library_for_each_cpu(
    features: str, found: int, in_package: dict[str, Path], source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(builder, "features", lambda: frozenset(features.split()))
    monkeypatch.setenv("CXX", "no-such-c++")
    assert packaged(source) == [*in_package.values()][found:]
    assert int(opened(source).answer()) == found
    assert packaged(source, "another machine") == []


def test_what_the_package_cannot_give_is_built(
    in_package: dict[str, Path], source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(builder, "features", lambda: frozenset("ab"))
    in_package["newest"].write_bytes(b"for a newer system")
    assert int(opened(source).answer()) == 1
    assert int(opened(source, ("-O1",)).answer()) == 42, "with flags of its own"
    source.write_text(f"{TINY}// changed")
    assert packaged(source) == [] and int(opened(source).answer()) == 42


def test_torchs_openmp_stands_in_for_one_that_is_missing(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a compiler may have none."""
    loaded, library = [], build(source)

    def load(path: str) -> ctypes.CDLL:
        loaded.append(Path(path).name)
        if "libgomp.so.1" not in loaded:
            raise OSError("libgomp.so.1: cannot open shared object file: No such file or directory")
        return ctypes.CDLL(path)

    monkeypatch.setattr(builder, "ctypes", SimpleNamespace(CDLL=load))
    assert int(opened(source).answer()) == 42
    assert loaded == [library.name, "libgomp.so.1", library.name]


def halve(library: Path) -> None:
    os.truncate(library, library.stat().st_size // 2)


def flip_a_bit(library: Path) -> None:
    content = bytearray(library.read_bytes())
    content[len(content) // 2] ^= 1
    library.unlink()  # others may have loaded it
    library.write_bytes(content)


def give_away(library: Path) -> None:
    library.chmod(0o777)


@pytest.mark.parametrize("damage", [halve, flip_a_bit, give_away])
def test_what_may_not_be_loaded_is_built_anew(
    damage: Callable[[Path], None], source: Path, environ: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    library = build(source, environ)
    whole = library.read_bytes()
    damage(library)
    assert build(source, environ) == library and answer(library) == 42
    assert library.read_bytes() == whole and library.stat().st_mode & 0o777 == 0o700
    expected = "writable by everybody" if damage is give_away else "damaged"
    compiling = "compiling tiny.cpp for this CPU: only the first start on a machine waits for it"
    assert caplog.messages == [compiling, f"built anew: {library} is {expected}", compiling]


def test_a_cache_that_others_can_write_is_not_used(
    source: Path, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder, owner = build(source, environ).parent, tmp_path.stat().st_uid
    folder.chmod(0o777)
    own = build(source, environ)
    assert own.parent == tmp_path / f"hytrain-{owner}" and own.parent.stat().st_mode & 0o777 == 0o700
    assert answer(own) == 42
    folder.chmod(0o700)
    monkeypatch.setattr(builder, "ROOT", owner + 1)
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    with pytest.raises(BackendUnavailable, match=f"is writable by user {owner}, too: set HYTRAIN_CACHE to a folder of"):
        build(source, environ)


@pytest.mark.parametrize(
    ("variables", "folder"),
    [
        ({"HYTRAIN_CACHE": "/a", "XDG_CACHE_HOME": "/b"}, Path("/a")),
        ({"XDG_CACHE_HOME": "/b"}, Path("/b/hytrain")),
        ({}, Path.home() / ".cache" / "hytrain"),
    ],
)
def test_cache_folder(variables: dict[str, str], folder: Path) -> None:
    assert cache_folder(variables) == folder


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"PATH": "/nowhere"}, r"^there is no C\+\+ compiler on the PATH: install one .*backend='torch'"),
        ({"CXX": "no-such-c++"}, r"^CXX names 'no-such-c\+\+', which is not there: install one"),
        ({"HYTRAIN_CACHE": f"{__file__}/below-a-file"}, "set HYTRAIN_CACHE to a folder of yours"),
        ({}, r"could not build tiny.cpp: .*backend='torch'.*\n.*error"),
    ],
)
def test_a_build_that_fails_says_what_to_do(
    source: Path, environ: dict[str, str], variables: dict[str, str], message: str
) -> None:
    source.write_text("not C++")
    with pytest.raises(BackendUnavailable, match=message):
        build(source, environ | variables)
    assert not list(source.parent.glob("cache/*"))


def test_what_cannot_be_loaded_is_told_as_what_cannot_be_built(
    source: Path, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a folder whose files may not be executed."""
    (built := source.with_suffix(".so")).write_text("no library")
    monkeypatch.setattr("hytrain.kernels.build.build", lambda *args, **options: built)
    with pytest.raises(BackendUnavailable, match=r"what was compiled of tiny.cpp cannot be loaded: .*tiny.so"):
        opened(source)


def test_auto_prefers_native_on_every_core_of_this_process() -> None:
    backend, reason = load()
    assert isinstance(backend, NativeBackend)
    assert (backend.threads, reason) == (len(os.sched_getaffinity(0)), "native: a library for this CPU is there")


def test_auto_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-c++")
    threads = torch.get_num_threads()
    try:
        backend, reason = load(threads=2)
        assert load("torch", threads=2)[1] == "torch: as asked"
    finally:
        torch.set_num_threads(threads)
    assert backend.name == "torch"
    assert reason.startswith("torch: native is not available (CXX names 'no-such-c++'") and "\n" not in reason
    with pytest.raises(BackendUnavailable):
        load("native", threads=2)


@pytest.mark.parametrize(
    ("name", "threads", "message"),
    [
        ("cuda", 1, "no backend 'cuda': choose auto, native, torch, deepspeed"),
        ("native", 0, "at least one thread, not 0"),
    ],
)
def test_impossible_requests(name: str, threads: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load(name, threads=threads)


@pytest.fixture
def vectorised() -> str:
    """What gcc says of the loops of the kernel. That is kept beside the kernel, since compiling takes long."""
    command = find_compiler(os.environ)
    if "Free Software Foundation" not in subprocess.run(
        [*command, "--version"], capture_output=True, text=True, check=True
    ).stdout:  # fmt: skip
        pytest.skip("only gcc has -fopt-info")
    report = build(SOURCE).with_suffix(".vectorised")
    if not report.exists():
        with TemporaryDirectory(dir=report.parent) as folder:
            said = subprocess.run(
                [*command, *builder.FLAGS, *builder.NATIVE, "-fopt-info-vec-optimized", SOURCE, "-o", f"{folder}/so"],
                capture_output=True, text=True, check=True,
            ).stderr  # fmt: skip
            (whole := Path(folder, "report")).write_text(said)
            whole.rename(report)
    return report.read_text()


def test_the_kernel_is_vectorised(vectorised: str) -> None:
    """One loop for each pair of dtypes."""
    assert vectorised.count("loop vectorized") >= len(DTYPES), vectorised
