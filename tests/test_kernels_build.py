"""Which backend is chosen, and how the native one is built: cache, concurrent builds, missing compiler."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hytrain.errors import BackendUnavailable
from hytrain.kernels import build as builder
from hytrain.kernels.backend import DTYPES
from hytrain.kernels.choice import load
from hytrain.kernels.build import build, cache_folder, find_compiler
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


def test_build_is_found_again(source: Path, environ: dict[str, str]) -> None:
    library = build(source, environ)
    assert answer(library) == 42
    built = library.stat()
    assert build(source, environ) == library
    assert (library.stat().st_ino, library.stat().st_mtime_ns) == (built.st_ino, built.st_mtime_ns)
    assert list(library.parent.iterdir()) == [library]  # no temporary file stays


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
        monkeypatch.setattr(builder, "_cpu", lambda: b"another")
    else:
        wrapper = tmp_path / "another-c++"
        wrapper.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo 99.0 && exit\nexec {compiler_of(environ)} "$@"\n')
        wrapper.chmod(0o755)
        environ["CXX"] = str(wrapper)
    other = build(source, environ)
    assert other != library and other.exists() and library.exists()


def compiler_of(environ: dict[str, str]) -> str:
    return find_compiler(environ)[0]


@pytest.mark.spawns
def test_builders_do_not_disturb_each_other(source: Path, environ: dict[str, str]) -> None:
    """Several processes at once, one cache: all get a whole library, and nothing else is left there."""
    program = (
        "import ctypes, sys; from pathlib import Path; from hytrain.kernels.build import build\n"
        "sys.stdin.readline()\n"  # all of them begin when all of them are up
        "print(ctypes.CDLL(str(build(Path(sys.argv[1])))).answer())"
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(source)],
            env=os.environ | environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for _ in range(3)
    ]  # fmt: skip
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    outputs = [process.communicate(timeout=240)[0].strip() for process in processes]
    assert outputs == ["42"] * 3
    assert len(list(Path(environ["HYTRAIN_CACHE"]).iterdir())) == 1


def test_a_late_builder_replaces_a_library_in_use(
    source: Path, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    library = build(source, environ)
    loaded = ctypes.CDLL(str(library))
    monkeypatch.setattr(Path, "exists", lambda self: False)  # as it looked to a builder that began earlier
    with ThreadPoolExecutor(2) as pool:
        assert set(pool.map(lambda _: build(source, environ), range(2))) == {library}
    assert loaded.answer() == 42
    assert answer(library) == 42


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


def test_compiler_may_have_arguments(environ: dict[str, str]) -> None:
    command = compiler_of(environ)
    assert find_compiler(environ | {"CXX": f"{command} -g"}) == (command, "-g")


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"PATH": "/nowhere"}, r"^there is no C\+\+ compiler on the PATH: install one .*backend='torch'"),
        ({"CXX": "no-such-c++"}, r"^CXX names 'no-such-c\+\+', which is not there: install one"),
    ],
)
def test_missing_compiler(source: Path, environ: dict[str, str], variables: dict[str, str], message: str) -> None:
    with pytest.raises(BackendUnavailable, match=message):
        build(source, environ | variables)


def test_failing_compiler(source: Path, environ: dict[str, str]) -> None:
    source.write_text("not C++")
    with pytest.raises(BackendUnavailable, match=r"could not build tiny.cpp: .*backend='torch'.*\n.*error"):
        build(source, environ)
    assert list(Path(environ["HYTRAIN_CACHE"]).iterdir()) == []


def test_cache_that_cannot_be_written(source: Path, environ: dict[str, str]) -> None:
    environ["HYTRAIN_CACHE"] = str(source / "below-a-file")
    with pytest.raises(BackendUnavailable, match="set HYTRAIN_CACHE to a folder of yours"):
        build(source, environ)


def test_auto_prefers_native() -> None:
    backend, reason = load(threads=1)
    assert isinstance(backend, NativeBackend)
    assert (backend.name, backend.threads, reason) == ("native", 1, "native: a C++ compiler is there")


def test_auto_without_a_compiler(monkeypatch: pytest.MonkeyPatch, restored_torch_threads: None) -> None:
    monkeypatch.setenv("CXX", "no-such-c++")
    backend, reason = load(threads=2)
    assert backend.name == "torch"
    assert reason.startswith("torch: native is not available (CXX names 'no-such-c++'")
    assert "\n" not in reason
    with pytest.raises(BackendUnavailable):
        load("native", threads=2)


@pytest.fixture
def restored_torch_threads() -> object:
    import torch

    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_what_was_asked_for_is_what_is_loaded(restored_torch_threads: None) -> None:
    backend, reason = load("torch", threads=2)
    assert (backend.name, reason) == ("torch", "torch: as asked")


def test_deepspeed_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    monkeypatch.setitem(sys.modules, "deepspeed.ops", None)
    monkeypatch.setitem(sys.modules, "deepspeed.ops.op_builder", None)
    with pytest.raises(BackendUnavailable, match="deepspeed is not installed: pip install deepspeed"):
        load("deepspeed", threads=1)


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


def test_default_is_every_core_of_this_process() -> None:
    backend, _ = load("native")
    assert isinstance(backend, NativeBackend)
    assert backend.threads == len(os.sched_getaffinity(0))


def test_the_kernel_is_vectorised(tmp_path: Path) -> None:
    """gcc says so itself: one loop for each pair of dtypes."""
    command = find_compiler(os.environ)
    if "Free Software Foundation" not in subprocess.run(
        [*command, "--version"], capture_output=True, text=True, check=True
    ).stdout:  # fmt: skip
        pytest.skip("only gcc has -fopt-info")
    report = subprocess.run(
        [*command, *builder.FLAGS, "-fopt-info-vec-optimized", str(SOURCE), "-o", str(tmp_path / "out.so")],
        capture_output=True, text=True, check=True,
    ).stderr  # fmt: skip
    assert report.count("loop vectorized") >= len(DTYPES), report
