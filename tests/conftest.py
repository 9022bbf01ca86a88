"""What every test gets: the checkout on the path, the markers `gpu`, `slow` and `spawns`, and the leak check.

a test marked `spawns`                                          no_leaks
TMPDIR = a private folder ◀──────────────────────────────────── before: processes, descriptors
starts processes, which inherit TMPDIR, however deep they are
ends ─────────────────────────────────────────────────────────▶ after: poll until nothing is left, or fail

The planes of layers are memfds. They have no name anywhere: a process holds them open, or they are gone. So descriptors
and processes are all that there is to look for; files in /dev/shm are not HyTrain's, and may be any program's.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Generator, Iterator
from pathlib import Path

import hypothesis
import psutil
import pytest
from cpu_seconds import CpuSeconds
from forks import Forked, Server

ROOT = Path(__file__).resolve().parent.parent
GRACE_S = 60.0  # for processes that are still on their way out when the test returns

# How long an example takes says nothing on a busy machine.
hypothesis.settings.register_profile("hytrain", deadline=None)
hypothesis.settings.load_profile("hytrain")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--run-slow", action="store_true", help="run the tests marked slow, too")


def pytest_configure(config: pytest.Config) -> None:
    """Tests, and the processes that they start, import this checkout, installed or not."""
    sys.path.insert(0, str(ROOT))
    inherited = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = f"{ROOT}{os.pathsep}{inherited}" if inherited else str(ROOT)
    # Several tests run at once: threads of torch's that look for work would take the cores from one another.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Where Triton is installed, torch's compiler would start a pool of processes that outlives the test.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    # A test's first plan does not depend on the tests before it.
    os.environ["HYTRAIN_PLAN_CACHE"] = ""
    config.pluginmanager.register(CpuSeconds())
    if not hasattr(config, "workerinput"):  # before there are several processes, which would all build it
        build_kernel()
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # inherited from a shell that runs this in the background
        signal.signal(signal.SIGINT, signal.default_int_handler)


def build_kernel() -> None:
    from hytrain.kernels.build import build

    with contextlib.suppress(Exception):  # the tests say what is wrong
        build(ROOT / "hytrain/kernels/update.cpp")


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Modules and tests stay until the end: the garbage collector need not look at them."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_runtest_setup() -> None:
    freeze(len(sys.modules))


@functools.cache
def freeze(modules: int) -> None:
    """Modules stay until the end: the garbage collector need not look at so many again, for 0.1 s each time."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    slow_wanted = config.getoption("--run-slow") or "slow" in config.option.markexpr
    for item in items:
        if item.get_closest_marker("frameworks") and "frameworks" not in config.option.markexpr:
            item.add_marker(pytest.mark.skip(reason="frameworks: ask for it with make test-frameworks"))
        if item.get_closest_marker("slow") and not slow_wanted:
            item.add_marker(pytest.mark.skip(reason="slow: ask for it with -m slow or --run-slow"))
        if item.get_closest_marker("gpu") and not has_cuda():
            item.add_marker(pytest.mark.skip(reason="gpu: torch sees no CUDA device here"))


@pytest.fixture(scope="session")
def forks() -> Iterator[None]:
    """Python programs are forks, if `Forked` starts them."""
    server = Server()
    yield
    server.close()


@pytest.fixture(scope="session")
def forked_workers(forks: None) -> Iterator[None]:
    """The launchers and CPU trainers of optimizers in this process are forks, too."""
    from examples.studies.cotraining import partner  # here, since they import torch
    from hytrain.run import cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cluster, "Popen", Forked)
        patch.setattr(partner, "Popen", Forked)
        yield


def has_cuda() -> bool:
    import torch  # here, so that a run without gpu tests does not wait for it

    return torch.cuda.is_available()


@pytest.fixture(autouse=True)
def no_leaks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """After a test marked `spawns`, no process, descriptor or temporary file of it remains."""
    if request.node.get_closest_marker("spawns") is None:
        yield
        return
    open_cuda()
    tmp_path_factory.getbasetemp()  # settled now, lest it be put into the folder below
    with pytest.MonkeyPatch.context() as patch:
        # Short, since an ipc:// path has 107 characters. Whoever has it in its environment is this test's.
        folder = Path(tempfile.mkdtemp(prefix="ht-"))
        patch.setenv("TMPDIR", str(folder))
        patch.setattr(tempfile, "tempdir", str(folder))
        # torch makes this folder where temporary files go when its compiler is first imported, and leaves it there.
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "inductor"))
        descriptors = open_descriptors()
        running = pids()
        yield
    try:
        deadline = time.monotonic() + GRACE_S
        while leaks := find_leaks(folder, descriptors, running):
            if time.monotonic() > deadline:
                pytest.fail("left behind:\n  " + "\n  ".join(leaks), pytrace=False)
            gc.collect()  # what only a reference cycle holds open is not leaked; it takes a tenth of a second
            time.sleep(0.02)
    finally:
        for process in processes_of(folder, running):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()  # the next test starts clean
        shutil.rmtree(folder, ignore_errors=True)  # one just killed may still be writing


def find_leaks(folder: Path, descriptors: set[str], running: set[int]) -> list[str]:
    """One line for each thing that is there now and was not before."""
    return [
        *(f"process {describe(process)}" for process in processes_of(folder, running)),
        *(f"file descriptor {name}" for name in sorted(open_descriptors() - descriptors)),
        *(f"temporary file or folder {path}" for path in sorted(folder.iterdir())),
    ]


def processes_of(folder: Path, running: set[int]) -> list[psutil.Process]:
    """Of those that were not running before: children, zombies too, and whatever carries the test's TMPDIR.

    A child that has lost it is one, or has a parent that is. One whose parent is gone is known by what it carries.
    """
    found = []
    carried = f"\0TMPDIR={folder}\0".encode()
    for pid in sorted(pids() - running):
        with contextlib.suppress(OSError, psutil.NoSuchProcess):  # gone meanwhile, or another user's
            process = psutil.Process(pid)
            if process.ppid() == os.getpid() or carried in b"\0" + Path("/proc", str(pid), "environ").read_bytes():
                found.append(process)
    return found


def pids() -> set[int]:
    return set(map(int, filter(str.isdecimal, os.listdir("/proc"))))


def describe(process: psutil.Process) -> str:
    try:
        seen = process.as_dict(["status", "name", "cmdline"])
    except psutil.NoSuchProcess:
        return f"{process.pid}, gone while looking"
    return f"{process.pid} ({seen['status']}): {' '.join(seen['cmdline'] or [seen['name']])}"


def open_descriptors() -> set[str]:
    """`number -> target` of each descriptor of this process."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        try:
            found.add(f"{number} -> {os.readlink(f'/proc/self/fd/{number}')}")
        except FileNotFoundError:
            continue  # the one that listed the folder
    return found


@functools.cache
def open_cuda() -> None:
    """The driver opens descriptors at first use, if only by a backward on the CPU, and keeps them until the end."""
    import torch

    if torch.version.cuda is not None:
        torch.ones(1, device="cuda" if has_cuda() else "cpu", requires_grad=True).sum().backward()
